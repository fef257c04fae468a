//! Files and folders of a store: private to their owner, and on disk when a
//! function says so.

use crate::StoreError;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

/// Options for a file that only its owner may read.
pub fn private_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// Makes a folder that only its owner may enter, and those above it.
///
/// # Errors
/// Where the file system refuses.
pub(crate) fn make_private_folder(path: &Path) -> Result<(), StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(StoreError::io("create", path))
}

/// Puts the names in a folder on disk (fsync(2) of the folder).
///
/// # Errors
/// Where the file system refuses.
pub(crate) fn sync_folder(path: &Path) -> Result<(), StoreError> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(StoreError::io("sync", path))
}

/// Puts a file in place in one step: after a crash it is there whole, or not
/// at all.
///
/// # Errors
/// Where the file system refuses; then nothing changed.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
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
        StoreError::io("write", path)(cause)
    })?;
    path.parent().map_or(Ok(()), sync_folder)
}

/// Removes a file; one that is gone already is as good.
///
/// # Errors
/// Where the file system refuses.
pub fn remove(path: &Path) -> Result<(), StoreError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(StoreError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}
