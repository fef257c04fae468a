//! Where a guest's files are.

use crate::PageCacheError;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, open, openat2, statfs};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
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

/// File systems whose files are no files that are read from a disk, or that may keep who asks waiting for good
/// (statfs(2)).
const NO_DISKS: [i64; 8] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x6367_7270, // cgroup2
    0x0027_e0eb, // cgroup
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x1cd1,      // devpts
    0x6573_5546, // fuse
];

impl FileTree {
    fn is_on_a_disk(&self) -> bool {
        statfs(&self.host).is_ok_and(|it| !NO_DISKS.contains(&it.f_type))
    }

    /// Adds the regular files below it that are wanted. What goes away meanwhile, or cannot be looked at, is left
    /// out.
    pub(crate) fn find(&self, wanted: impl Fn(FileKey) -> bool, found: &mut Vec<Found>) {
        let Ok(top) = fs::symlink_metadata(&self.host) else { return };
        if !self.is_on_a_disk() {
            return;
        }
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

    /// Opens a regular file that the guest has at this path; `None` where it is not below this tree. A guest must
    /// not lead its host elsewhere: no symbolic link is followed and no other file system entered, and what is no
    /// regular file is not opened at all.
    pub(crate) fn open(&self, path: &Path) -> Option<Result<(File, Metadata), PageCacheError>> {
        let below = path.strip_prefix(&self.inside).ok()?;
        let failed = PageCacheError::file("open", path);
        Some(self.open_below(below).map_err(failed))
    }

    fn open_below(&self, below: &Path) -> io::Result<(File, Metadata)> {
        let place = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = if below.as_os_str().is_empty() {
            openat2(CWD, &self.host, place, Mode::empty(), ResolveFlags::NO_MAGICLINKS)?
        } else {
            let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
            let top = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let top = open(&self.host, top, Mode::empty())?;
            openat2(&top, below, place, Mode::empty(), beneath)?
        };
        let found = File::from(found);
        let metadata = found.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        // The same file, whatever has its name now.
        let again = format!("/proc/self/fd/{}", found.as_raw_fd());
        let how = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOATIME | OFlags::NOCTTY;
        Ok((File::from(open(again, how, Mode::empty())?), metadata))
    }
}
