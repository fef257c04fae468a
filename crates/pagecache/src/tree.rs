//! Where a guest's files are.

use crate::PageCacheError;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, open, openat2};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Files that a guest has: a folder with all that is below it on the same file system, or one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileTree {
    /// Where it is here.
    pub host: PathBuf,
    /// Where the guest has it.
    pub inside: PathBuf,
}

/// A file, by its file system's device (as stat(2) has it) and number.
pub(crate) type FileKey = (u64, u64);

/// A file that was looked for.
pub(crate) struct Found {
    pub(crate) key: FileKey,
    pub(crate) inside: PathBuf,
    pub(crate) metadata: Metadata,
}

pub(crate) fn key(file: &Metadata) -> FileKey {
    (file.dev(), file.ino())
}

impl FileTree {
    /// Adds the regular files below it that are wanted. What goes away meanwhile, or cannot be looked at, is left
    /// out.
    pub(crate) fn find(&self, wanted: impl Fn(FileKey) -> bool, found: &mut Vec<Found>) {
        let Ok(top) = fs::symlink_metadata(&self.host) else { return };
        let device = top.dev();
        let mut left = vec![(self.host.clone(), self.inside.clone(), top)];
        while let Some((host, inside, metadata)) = left.pop() {
            if metadata.is_file() && wanted(key(&metadata)) {
                found.push(Found { key: key(&metadata), inside, metadata });
            } else if metadata.is_dir() && metadata.dev() == device {
                for entry in fs::read_dir(&host).into_iter().flatten().flatten() {
                    if let Ok(metadata) = entry.metadata() {
                        left.push((entry.path(), inside.join(entry.file_name()), metadata));
                    }
                }
            }
        }
    }

    /// Opens a file that the guest has at this path; `None` where it is not below this tree. No symbolic link is
    /// followed: a guest must not lead its host elsewhere.
    pub(crate) fn open(&self, path: &Path) -> Option<Result<File, PageCacheError>> {
        let below = path.strip_prefix(&self.inside).ok()?;
        let failed =
            |cause: rustix::io::Errno| PageCacheError::file("open", path)(io::Error::from(cause));
        let how = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let opened = if below.as_os_str().is_empty() {
            openat2(CWD, &self.host, how, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
        } else {
            let place = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            open(&self.host, place, Mode::empty())
                .and_then(|root| openat2(&root, below, how, Mode::empty(), inside))
        };
        Some(opened.map(File::from).map_err(failed))
    }
}
