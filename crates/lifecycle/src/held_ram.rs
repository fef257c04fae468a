//! RAM without a name, and the link in its place.
//!
//! The kernel keeps files in RAM across a kexec only if they have no name, and gives them back without one. Such a file
//! lives as long as some process has it open. In the place of its name is a symbolic link to that process's descriptor,
//! `/proc/PID/fd/N` (proc_pid_fd(5)): who opens the path has the file, as before.
//!
//! ```text
//!  a file with a name  --- hold ---->  link to the watcher's  --- thaw ---->  link to QEMU's
//!          ^                           (QEMU has it, too)                          |
//!          └--------- give_name: copied, since the kernel gives no name back ------┘
//! ```
//!
//! While the guest runs the link leads to its QEMU. A guest whose QEMU is to end gets a file with a name first.

use crate::failure::{Code, Failure};
use dewar_kernel::{Pid, list_fds};
use dewar_registry::{GuestFolder, GuestRecord, RamFile};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

/// Bytes that are copied at once.
const PIECE: usize = 2 << 20;

/// Whether a file has no name, but a link in its place.
pub fn is_link(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_symlink())
}

/// Has a path lead to an open file of this process.
///
/// # Errors
/// Where the link cannot be made; what was there is there still.
pub fn link_here(path: &Path, file: &File) -> io::Result<()> {
    link(path, std::process::id() as i32, file.as_raw_fd())
}

/// Has a path lead to the descriptor by which a process has the same file open.
///
/// # Errors
/// Where it has not, or the link cannot be made; what was there is there still.
pub fn link_to(path: &Path, pid: i32) -> io::Result<()> {
    let wanted = fs::metadata(path)?;
    let number = number_of(pid, |data| is_same(data, &wanted));
    link(path, pid, number.ok_or(io::ErrorKind::NotFound)?)
}

fn link(path: &Path, pid: i32, number: i32) -> io::Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".link");
    let part = PathBuf::from(part);
    match fs::remove_file(&part) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => symlink(format!("/proc/{pid}/fd/{number}"), &part)?,
    }
    fs::rename(&part, path)
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// The first descriptor of a process of which something holds.
fn number_of(pid: i32, holds: impl Fn(&Metadata) -> bool) -> Option<i32> {
    let fds = list_fds(Pid(pid)).ok()?;
    let mut numbers = fds.into_iter().map(|fd| fd.number);
    numbers.find(|number| {
        fs::metadata(format!("/proc/{pid}/fd/{number}")).is_ok_and(|data| holds(&data))
    })
}

/// Whether the path's link leads to a process.
fn leads_to(path: &Path, pid: i32) -> bool {
    let target = fs::read_link(path).unwrap_or_default();
    target.starts_with(format!("/proc/{pid}/fd")) && path.exists()
}

/// Has the links of a guest that runs lead to its QEMU, wherever they led. What cannot be found is left as it is.
pub fn follow(record: &GuestRecord) {
    let pid = record.process.pid;
    for file in record.ram.iter().filter(|file| is_link(&file.path) && !leads_to(&file.path, pid)) {
        if link_to(&file.path, pid).is_ok() {
            continue;
        }
        // The link's process has ended. By its size, then: no other file of QEMU's without a name has it.
        let is_it =
            |data: &Metadata| data.nlink() == 0 && data.is_file() && data.len() == file.bytes;
        if let Some(number) = number_of(pid, is_it) {
            let _ = link(&file.path, pid, number);
        }
    }
}

/// The step of recovery: a command that brought a guest back may have died before the links led to its QEMU.
pub fn recover(_: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    if record.process.is_alive() {
        follow(&record);
    }
    Ok(record)
}

/// Gives memory that only a guest's own QEMU holds a file with a name, since that QEMU is about to end. The guest
/// stands still.
///
/// # Errors
/// Where there is no room for a copy.
pub fn give_names(record: &GuestRecord) -> Result<(), Failure> {
    let pid = record.process.pid;
    record.ram.iter().filter(|file| leads_to(&file.path, pid)).try_for_each(give_name)
}

/// Copies a file that has no name to one that has the name of its link.
///
/// # Errors
/// Where there is no room; nothing has changed then.
pub fn give_name(ram: &RamFile) -> Result<(), Failure> {
    let mut part = ram.path.as_os_str().to_owned();
    part.push(".copy");
    let part = PathBuf::from(part);
    let copied = copy(&ram.path, &part, ram.bytes).and_then(|()| fs::rename(&part, &ram.path));
    copied.map_err(|error| {
        let _ = fs::remove_file(&part);
        let what = format!("memory cannot be given a file, {}: {error}", ram.path.display());
        Failure::new(Code::Failed, what)
    })
}

fn copy(from: &Path, to: &Path, bytes: u64) -> io::Result<()> {
    let from = File::open(from)?;
    let mut options = OpenOptions::new();
    let to = options.write(true).create(true).truncate(true).mode(0o600).open(to)?;
    to.set_len(bytes)?;
    let mut piece = vec![0; PIECE];
    for at in (0..bytes).step_by(PIECE) {
        let piece = &mut piece[..(bytes - at).min(PIECE as u64) as usize];
        from.read_exact_at(piece, at)?;
        if piece.iter().any(|byte| *byte != 0) {
            to.write_all_at(piece, at)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A file that has no name any more, open here, and the link in its place.
    fn held(folder: &Path) -> (PathBuf, File) {
        let path = folder.join("ram");
        fs::write(&path, b"what was there").expect("a file");
        let file = File::options().read(true).write(true).open(&path).expect("open");
        link_here(&path, &file).expect("a link");
        (path, file)
    }

    #[test]
    fn who_opens_the_link_has_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, mut file) = held(folder.path());
        assert!(is_link(&path));
        assert_eq!(file.metadata().expect("the file").nlink(), 0);
        file.write_all(b"WHAT").expect("write");
        assert_eq!(fs::read(&path).expect("read"), b"WHAT was there");
        link_to(&path, std::process::id() as i32).expect("found by what it is");
        drop(file);
        assert!(!path.exists(), "nobody holds it");
    }

    #[test]
    fn a_name_is_given_by_a_copy() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, file) = held(folder.path());
        file.set_len(5 << 20).expect("size");
        give_name(&RamFile { id: "ram".to_owned(), path: path.clone(), bytes: 5 << 20 })
            .expect("a copy");
        drop(file);
        assert!(!is_link(&path));
        let bytes = fs::read(&path).expect("read");
        assert_eq!((bytes.len(), &bytes[..14]), (5 << 20, &b"what was there"[..]));
    }
}
