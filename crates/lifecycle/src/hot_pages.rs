//! The manifest of a guest's hot pages, as a file.

use crate::failure::{Code, Failure};
use dewar_pagecache::{MOST_MANIFEST_BYTES, Manifest, PageCacheError};
use rustix::fs::OFlags;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What is known of a guest's hot pages, in its folder and in the checkpoints of a container.
pub(crate) const HOT_PAGES: &str = "hot-pages.json";

impl From<PageCacheError> for Failure {
    fn from(error: PageCacheError) -> Self {
        let code = match error {
            PageCacheError::Tracing { .. } => Code::Unsupported,
            _ => Code::Failed,
        };
        Self::new(code, error.to_string())
    }
}

/// The manifest in a file; `None` where there is no file.
pub(crate) fn read(path: &Path) -> Result<Option<Manifest>, Failure> {
    let failed = |error: std::io::Error| {
        Failure::new(Code::Failed, format!("reading {}: {error}", path.display()))
    };
    // It may be a stranger's: no link, no device, nothing without an end.
    let how = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match OpenOptions::new().read(true).custom_flags(how).open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(failed)?,
    };
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(failed(std::io::Error::other("it is no regular file")));
    }
    let mut bytes = Vec::new();
    file.take(MOST_MANIFEST_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some(Manifest::parse(&bytes)?))
}
