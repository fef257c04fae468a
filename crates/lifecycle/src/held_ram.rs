//! RAM without a name, and the link in its place.
//!
//! The kernel keeps files in RAM across a kexec only if they have no name, and gives them back without one. Such a file
//! lives as long as some process has it open. In the place of its name is a symbolic link to that process's descriptor,
//! `/proc/PID/fd/N` (proc_pid_fd(5)): who opens the path has the file, as before.
//!
//! ```text
//!  a file with a name  -- link_to -->  link to the watcher's  -- follow -->  link to QEMU's
//!          ^                           (QEMU has it, too)                         |
//!          └--------- give_names: copied, since the kernel gives no name back ----┘
//! ```
//!
//! While the guest runs the link leads to its QEMU. A guest whose QEMU is to end gets a file with a name first, unless
//! the watcher has its memory.

use crate::failure::{Code, Failure};
use dewar_kernel::{Pid, list_fds};
use dewar_registry::{GuestFolder, GuestRecord, RamFile};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

/// Bytes that are copied at once.
const PIECE: usize = 2 << 20;

/// Whether a file has no name, but a link in its place.
pub fn is_link(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_symlink())
}

/// Whether the link in the place of a file leads to a process.
pub fn leads_to(path: &Path, pid: i32) -> bool {
    let target = fs::read_link(path).unwrap_or_default();
    target.starts_with(format!("/proc/{pid}/fd")) && path.exists()
}

/// Has a path lead to the descriptor by which a process has a file open.
///
/// # Errors
/// Where it has not, or the link cannot be made; what was there is there still.
pub fn link_to_file(path: &Path, pid: i32, file: &File) -> io::Result<()> {
    link_to_wanted(path, pid, &file.metadata()?)
}

/// The same with the file that the path leads to now.
///
/// # Errors
/// As [`link_to_file`].
pub fn link_to(path: &Path, pid: i32) -> io::Result<()> {
    link_to_wanted(path, pid, &fs::metadata(path)?)
}

fn link_to_wanted(path: &Path, pid: i32, wanted: &Metadata) -> io::Result<()> {
    let is_it = |data: &Metadata| (data.dev(), data.ino()) == (wanted.dev(), wanted.ino());
    let number = numbers_of(pid, is_it).into_iter().next().ok_or(io::ErrorKind::NotFound)?;
    link(path, &descriptor(pid, number))
}

fn descriptor(pid: i32, number: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/fd/{number}"))
}

/// Puts a link in the place of what is there, in one step.
fn link(path: &Path, target: &Path) -> io::Result<()> {
    let part = beside(path, ".link");
    match fs::remove_file(&part) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => symlink(target, &part)?,
    }
    fs::rename(&part, path)
}

/// A path in the same folder, which is swept up with the guest's others.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// The descriptors of a process of which something holds.
fn numbers_of(pid: i32, holds: impl Fn(&Metadata) -> bool) -> Vec<i32> {
    let fds = list_fds(Pid(pid)).unwrap_or_default();
    let is_it = |number: &i32| fs::metadata(descriptor(pid, *number)).is_ok_and(|it| holds(&it));
    fds.into_iter().map(|fd| fd.number).filter(is_it).collect()
}

/// Has the links of a guest that runs lead to its QEMU, wherever they led. What cannot be found is left as it is.
pub fn follow(record: &GuestRecord) {
    let pid = record.process.pid;
    for file in record.ram.iter().filter(|file| is_link(&file.path) && !leads_to(&file.path, pid)) {
        if link_to(&file.path, pid).is_ok() {
            continue;
        }
        // The link's process has ended.
        link_by_size(file, record);
    }
}

/// Has a path lead to the file without a name that a guest's QEMU has, known by its size, where that can be one
/// file alone.
fn link_by_size(file: &RamFile, record: &GuestRecord) {
    let pid = record.process.pid;
    let is_it = |data: &Metadata| data.nlink() == 0 && data.is_file() && data.len() == file.bytes;
    if let ([number], 1) = (&numbers_of(pid, is_it)[..], record.ram.len()) {
        let _ = link(&file.path, &descriptor(pid, *number));
    }
}

/// The step of recovery: a command that brought a guest back may have died before the links led to its QEMU, and
/// one that froze it after its memory had got a name.
pub fn recover(_: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    if record.process.is_alive() {
        // A frozen guest's QEMU is only about to end.
        if record.frozen.is_none() {
            take_names_back(&record);
        }
        follow(&record);
    }
    Ok(record)
}

/// Has links be in the place of copies that no process uses, since the QEMU that they were made for did not end.
pub fn take_names_back(record: &GuestRecord) {
    let pid = record.process.pid;
    for file in record.ram.iter().filter(|file| !is_link(&file.path)) {
        let _ = fs::remove_file(beside(&file.path, ".copy"));
        let Ok(named) = fs::metadata(&file.path) else { continue };
        let is_named = |data: &Metadata| (data.dev(), data.ino()) == (named.dev(), named.ino());
        if numbers_of(pid, is_named).is_empty() {
            link_by_size(file, record);
        }
    }
}

/// Files that were given names, and where the links in their places led.
#[derive(Debug, Default)]
pub struct GivenNames(Vec<(PathBuf, PathBuf)>);

impl GivenNames {
    /// Has the links be there again: their QEMU does not end after all.
    pub fn take_back(&self) {
        for (path, target) in &self.0 {
            let _ = link(path, target);
        }
    }
}

/// Gives memory that only a guest's own QEMU holds a file with a name, since that QEMU is about to end. The guest
/// stands still.
///
/// # Errors
/// Where there is no room for a copy; all is as before then.
pub fn give_names(record: &GuestRecord) -> Result<GivenNames, Failure> {
    let pid = record.process.pid;
    let mut given = GivenNames::default();
    for ram in record.ram.iter().filter(|file| leads_to(&file.path, pid)) {
        let target = fs::read_link(&ram.path).unwrap_or_default();
        give_name(ram).inspect_err(|_| given.take_back())?;
        given.0.push((ram.path.clone(), target));
    }
    Ok(given)
}

/// Copies a file that has no name to one that has the name of its link.
fn give_name(ram: &RamFile) -> Result<(), Failure> {
    let part = beside(&ram.path, ".copy");
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
    use dewar_registry::ProcessId;
    use std::io::Write;

    fn own_pid() -> i32 {
        std::process::id() as i32
    }

    /// A file that has no name any more, open here, and the link in its place.
    fn held(folder: &Path) -> (PathBuf, File) {
        let path = folder.join("ram");
        fs::write(&path, b"what was there").expect("a file");
        let file = File::options().read(true).write(true).open(&path).expect("open");
        link_to_file(&path, own_pid(), &file).expect("a link");
        (path, file)
    }

    /// A guest that "runs" in this process.
    fn guest(path: &Path, bytes: u64) -> GuestRecord {
        let own = ProcessId::of(own_pid()).expect("this process");
        let line = (PathBuf::from("qemu"), Vec::new());
        let record = GuestRecord::new("g", own, line, PathBuf::from("/"), PathBuf::from("/qmp"));
        let ram = RamFile { id: "ram".to_owned(), path: path.to_owned(), bytes };
        GuestRecord { ram: vec![ram], ..record }
    }

    #[test]
    fn who_opens_the_link_has_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, mut file) = held(folder.path());
        assert!(is_link(&path) && leads_to(&path, own_pid()));
        assert_eq!(file.metadata().expect("the file").nlink(), 0);
        file.write_all(b"WHAT").expect("write");
        assert_eq!(fs::read(&path).expect("read"), b"WHAT was there");
        link_to(&path, own_pid()).expect("found by what it is");
        drop(file);
        assert!(!path.exists(), "nobody holds it");
    }

    #[test]
    fn a_name_is_given_by_a_copy_and_taken_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, file) = held(folder.path());
        file.set_len(5 << 20).expect("size");
        let given = give_names(&guest(&path, 5 << 20)).expect("a copy");
        assert!(!is_link(&path));
        let bytes = fs::read(&path).expect("read");
        assert_eq!((bytes.len(), &bytes[..14]), (5 << 20, &b"what was there"[..]));
        given.take_back();
        assert!(leads_to(&path, own_pid()), "its QEMU has it still");
    }

    #[test]
    fn a_copy_that_a_dead_command_made_is_not_taken_for_the_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, file) = held(folder.path());
        let bytes = (5 << 20) + 4567;
        file.set_len(bytes).expect("size");
        let record = guest(&path, bytes);
        give_names(&record).expect("a copy");
        fs::write(beside(&path, ".copy"), "half of one").expect("write");
        take_names_back(&record);
        assert!(leads_to(&path, own_pid()), "its QEMU has it still");
        assert!(!is_link(&beside(&path, ".copy")) && !beside(&path, ".copy").exists());
        // Memory that has a name is left alone.
        fs::remove_file(&path).expect("remove");
        fs::write(&path, vec![0; bytes as usize]).expect("RAM");
        let named = File::open(&path).expect("open");
        take_names_back(&record);
        assert!(!is_link(&path));
        drop((named, file));
    }

    #[test]
    fn a_link_whose_process_has_ended_is_found_by_its_size_where_that_is_one_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, file) = held(folder.path());
        let bytes = (3 << 20) + 12345;
        file.set_len(bytes).expect("size");
        link(&path, Path::new("/proc/4194305/fd/3")).expect("a link to nobody");
        follow(&guest(&path, bytes));
        assert!(leads_to(&path, own_pid()));
        let other = tempfile::tempfile().expect("another without a name");
        other.set_len(bytes).expect("size");
        link(&path, Path::new("/proc/4194305/fd/3")).expect("a link to nobody");
        follow(&guest(&path, bytes));
        assert!(!path.exists(), "which of the two it is nobody knows");
    }
}
