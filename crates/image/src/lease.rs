//! Who is writing: a file in `writers/` that names, before they are made, all
//! files of an image that does not exist yet.
//!
//! Its writer holds a lock on it. When the writer dies the lock goes, and
//! whoever finds an unlocked lease removes the files that it names (unless the
//! image's record exists: then only the lease is left over).
//!
//! A lease is locked before it gets its name, so a named one without a lock
//! has no writer.

use crate::{ImageError, ImageId, files};
use rustix::fs::{FlockOperation, flock};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const SUFFIX: &str = ".lease";

/// A lease that we hold.
#[derive(Debug)]
pub(crate) struct WriterLease {
    file: File,
    path: PathBuf,
}

impl WriterLease {
    pub(crate) fn take(folder: &Path, id: &ImageId) -> Result<Self, ImageError> {
        let path = folder.join(format!("{id}{SUFFIX}"));
        let part = folder.join(format!("{id}.part"));
        let create = || -> std::io::Result<File> {
            let file = files::private_options().write(true).create_new(true).open(&part)?;
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            fs::rename(&part, &path)?;
            Ok(file)
        };
        let file = create().map_err(ImageError::io("create", &path))?;
        Ok(Self { file, path })
    }

    /// Notes files, by their path in the store, that are about to be made.
    pub(crate) fn note(&mut self, names: &[String]) -> Result<(), ImageError> {
        let text: String = names.iter().map(|name| format!("{name}\n")).collect();
        self.file
            .write_all(text.as_bytes())
            .and_then(|()| self.file.sync_data())
            .map_err(ImageError::io("write", &self.path))
    }

    /// The image exists now: its files are no longer ours.
    pub(crate) fn release(self) -> Result<(), ImageError> {
        files::remove(&self.path)
    }

    /// The image will not exist: removes its files.
    pub(crate) fn abandon(&self, root: &Path) -> Result<(), ImageError> {
        remove_named(root, &self.path)?;
        files::remove(&self.path)
    }
}

/// Removes what dead writers left. `exists` tells whether an image does.
pub(crate) fn sweep(
    root: &Path,
    folder: &Path,
    exists: impl Fn(&ImageId) -> bool,
) -> Result<(), ImageError> {
    let entries = fs::read_dir(folder).map_err(ImageError::io("list", folder))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        let Some(id) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(SUFFIX)) else {
            continue;
        };
        let Ok(file) = File::open(&path) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() || !is_at(&file, &path) {
            continue;
        }
        if !exists(&ImageId(id.to_owned())) {
            remove_named(root, &path)?;
        }
        files::remove(&path)?;
    }
    Ok(())
}

/// The files that leases name, by their path in the store.
pub(crate) fn named(folder: &Path) -> Result<HashSet<String>, ImageError> {
    let mut names = HashSet::new();
    let entries = fs::read_dir(folder).map_err(ImageError::io("list", folder))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        match fs::read_to_string(&path) {
            Ok(text) => names.extend(text.lines().map(str::to_owned)),
            // Its image is there now, or given up.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(ImageError::io("read", &path)(error)),
        }
    }
    Ok(names)
}

/// Whether `path` still means the file that we opened and locked.
fn is_at(file: &File, path: &Path) -> bool {
    matches!((file.metadata(), fs::metadata(path)), (Ok(a), Ok(b)) if a.ino() == b.ino())
}

fn remove_named(root: &Path, lease: &Path) -> Result<(), ImageError> {
    let mut text = String::new();
    File::open(lease)
        .and_then(|mut file| file.read_to_string(&mut text))
        .map_err(ImageError::io("read", lease))?;
    // A line without its end was being written: its file was not made yet.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for name in whole.lines().filter(|name| is_inside(name)) {
        files::remove(&root.join(name))?;
    }
    Ok(())
}

/// Whether a name stays inside the store.
fn is_inside(name: &str) -> bool {
    (name.starts_with("segments/") || name.starts_with("disks/")) && !name.contains("..")
}
