//! Small JSON files that are whole or not there.

use crate::error::{RegistryError, io_error};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Reads one; `None` where there is none.
pub(crate) fn read<T: DeserializeOwned>(
    folder: &Path,
    name: &str,
) -> Result<Option<T>, RegistryError> {
    let path = folder.join(name);
    match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| io_error("read", &path)(io::Error::other(error))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("read", &path)(error)),
    }
}

/// Writes one in one step, and to disk.
pub(crate) fn write(
    folder: &Path,
    name: &str,
    value: &impl Serialize,
) -> Result<(), RegistryError> {
    let file = replace(folder, name, value, File::sync_all);
    file.and_then(|()| File::open(folder)?.sync_all())
        .map_err(io_error("write", &folder.join(name)))
}

/// The same for what is worth nothing when the host has restarted: it does not wait for the disk.
pub(crate) fn write_for_now(
    folder: &Path,
    name: &str,
    value: &impl Serialize,
) -> Result<(), RegistryError> {
    replace(folder, name, value, |_| Ok(())).map_err(io_error("write", &folder.join(name)))
}

/// Removes one, if it is there, for good.
pub(crate) fn remove(folder: &Path, name: &str) -> Result<(), RegistryError> {
    let path = folder.join(name);
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io_error("remove", &path)(error)),
        Ok(()) => File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(io_error("sync", folder)),
    }
}

fn replace(
    folder: &Path,
    name: &str,
    value: &impl Serialize,
    sync: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let part = folder.join(format!("{name}.part"));
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    // At once: written straight to a file each word of it would be a call.
    file.write_all(&text)?;
    sync(&file)?;
    fs::rename(&part, folder.join(name))
}
