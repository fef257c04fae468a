//! Whether a disk that both hosts have under a path is one and the same file.
//!
//! Its number in its file system does not tell: file systems that were made alike give the same numbers. So the source
//! gives each disk an extended attribute (xattr(7)) for as long as the other host looks, and that host must find it.
//! The file's content and times stay as they are. Where the file system of either host has no such attributes, as NFS
//! before 4.2, the number must do.

use rustix::fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What the names of all such attributes begin with. Each has a name of its own: no other value of it was seen before.
const PREFIX: &str = "user.dewar.move.";

/// A disk, as the other host reaches it, and the name of its attribute.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct DiskMark {
    disk: PathBuf,
    name: String,
}

/// The attributes that disks were given; dropped, they are removed.
#[derive(Debug)]
pub(super) struct DiskMarks {
    name: String,
    disks: Vec<PathBuf>,
}

impl DiskMarks {
    /// Marks disks, by a number that no other mark has: each as it is here, and where it is at the other host.
    pub fn make(disks: &[(PathBuf, PathBuf)], number: u64) -> (Self, Vec<DiskMark>) {
        let name = format!("{PREFIX}{number:016x}");
        let (mut marks, mut told) = (Self { name, disks: Vec::new() }, Vec::new());
        for (here, there) in disks {
            remove_old(here);
            if setxattr(here, &*marks.name, &[], XattrFlags::empty()).is_ok() {
                marks.disks.push(here.clone());
                told.push(DiskMark { disk: there.clone(), name: marks.name.clone() });
            }
        }
        (marks, told)
    }
}

impl Drop for DiskMarks {
    fn drop(&mut self) {
        for disk in &self.disks {
            let _ = removexattr(disk, &*self.name);
        }
    }
}

/// Removes what a command that was killed left. Nobody else moves the guest.
fn remove_old(disk: &Path) {
    let mut names = vec![0; 4096];
    let Ok(length) = listxattr(disk, &mut names[..]) else { return };
    for name in names[..length].split(|byte| *byte == 0) {
        if name.starts_with(PREFIX.as_bytes()) {
            let _ = removexattr(disk, name);
        }
    }
}

/// The first disk that has not the mark that the source gave its own.
pub(super) fn first_other(marks: &[DiskMark]) -> Option<&Path> {
    let has_none = |mark: &&DiskMark| {
        let found = getxattr(&mark.disk, &*mark.name, &mut [0; 1][..]);
        matches!(found, Err(Errno::NODATA))
    };
    marks.iter().find(has_none).map(|mark| mark.disk.as_path())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_disk_without_the_mark_is_another() {
        // Not /tmp: a file system in memory may have no attributes.
        let program = std::env::current_exe().expect("this program");
        let folder = tempfile::tempdir_in(program.parent().expect("folder")).expect("folder");
        let [ours, link, theirs] = ["ours", "link", "theirs"].map(|name| folder.path().join(name));
        fs::write(&ours, "").expect("disk");
        fs::hard_link(&ours, &link).expect("link");
        fs::write(&theirs, "").expect("disk");
        let all = [(ours.clone(), ours.clone()), (ours.clone(), link)];
        let (killed, told) = DiskMarks::make(&all[..1], 1);
        assert_eq!((told.len(), first_other(&told)), (1, None));
        std::mem::forget(killed);
        // Under another path it is the same.
        let (marks, told) = DiskMarks::make(&all, 2);
        assert_eq!(first_other(&told[1..]), None);
        drop(marks);
        assert_eq!(listxattr(&ours, &mut [0; 0][..]), Ok(0), "nothing is left");
        let (_marks, told) = DiskMarks::make(&[(ours, theirs.clone())], 3);
        assert_eq!(first_other(&told), Some(&*theirs));
    }
}
