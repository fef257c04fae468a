//! Files and folders of a store: private to their owner, and on disk when a
//! function says so.

use crate::ImageError;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

/// The length and BLAKE3 hash of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDigest {
    /// Bytes.
    pub bytes: u64,
    /// Hash of all of them, in hexadecimal.
    pub blake3: String,
}

impl FileDigest {
    /// Reads a whole file.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn of(path: &Path) -> Result<Self, ImageError> {
        let failed = |cause| ImageError::io("read", path)(cause);
        let mut file = File::open(path).map_err(failed)?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            let count = file.read(&mut buffer).map_err(failed)?;
            if count == 0 {
                return Ok(Self { bytes, blake3: hasher.finalize().to_hex().to_string() });
            }
            hasher.update(&buffer[..count]);
            bytes += count as u64;
        }
    }
}

pub(crate) fn private_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

pub(crate) fn make_private_folder(path: &Path) -> Result<(), ImageError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(ImageError::io("create", path))
}

pub(crate) fn sync_folder(path: &Path) -> Result<(), ImageError> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(ImageError::io("sync", path))
}

/// Puts a file in place in one step: after a crash it is there whole, or not
/// at all.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), ImageError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let part = path.with_file_name(name);
    let write = || -> io::Result<()> {
        let mut file = private_options().write(true).create(true).truncate(true).open(&part)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&part, path)
    };
    write().map_err(|cause| {
        let _ = fs::remove_file(&part);
        ImageError::io("write", path)(cause)
    })?;
    path.parent().map_or(Ok(()), sync_folder)
}

/// Removes a file; one that is gone already is as good.
pub(crate) fn remove(path: &Path) -> Result<(), ImageError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(ImageError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}
