//! The memory of a guest that is held: exchanged for empty files, or copied.

use super::error::{ResetError, file};
use crate::qmp::Qmp;
use dewar_kernel::{Pid, duplicate_in, list_fds, map_over_in};
use dewar_registry::{GuestRecord, RamFile};
use dewar_units::PAGE_BYTES;
use procfs::process::{MMapPath, Process};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::json;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Where firmware is shadowed, in guest addresses.
const SHADOW: Range<u64> = 0xc_0000..0x10_0000;
/// What QEMU knows a passed descriptor by.
const PASSED: &str = "dewar-next-ram";
/// Bytes that are copied at once.
const PIECE: usize = 2 << 20;

/// What a guest had in its memory when it was reset.
#[derive(Debug)]
pub struct MemoryAside {
    /// Files without a name, which nobody else has.
    pub files: Vec<File>,
    /// Why some of it is a copy, where it could not be exchanged.
    pub copied: Option<ResetError>,
}

pub(super) fn set_aside(
    qmp: &mut Qmp,
    record: &GuestRecord,
    may_copy: bool,
    reached: &dyn Fn(&str),
) -> Result<MemoryAside, ResetError> {
    let pid = Pid(record.process.pid);
    let mut aside = MemoryAside { files: Vec::new(), copied: None };
    for ram in &record.ram {
        let old = File::options().read(true).write(true).open(&ram.path);
        let old = old.map_err(file("open", &ram.path))?;
        let next = next_path(&ram.path);
        let exchanged = make_next(&old, ram, &next).and_then(|new| {
            reached("made");
            let exchanged = exchange(qmp, pid, &ram.path, &next, &new);
            if exchanged.is_ok() {
                reached("mapped");
            }
            exchanged
        });
        // Also where it failed half way: the file that QEMU has is the one by that name.
        settle_file(pid, &ram.path)?;
        match exchanged {
            Ok(()) => aside.files.push(old),
            Err(_) if may_copy && is_at(&old, &ram.path) => {
                aside.files.push(copy(&old).map_err(file("copy", &ram.path))?);
                aside.copied = exchanged.err();
            }
            Err(error) => return Err(error),
        }
    }
    Ok(aside)
}

/// Whether a file has this name still.
fn is_at(file: &File, path: &Path) -> bool {
    let place = |data: fs::Metadata| (data.dev(), data.ino());
    file.metadata().ok().map(place) == fs::metadata(path).ok().map(place)
}

/// A copy of a file in memory, with holes in place of zeros.
fn copy(old: &File) -> io::Result<File> {
    let copy = File::from(memfd_create("dewar-memory-before", MemfdFlags::CLOEXEC)?);
    let bytes = old.metadata()?.len();
    copy.set_len(bytes)?;
    let mut piece = vec![0; PIECE];
    for at in (0..bytes).step_by(PIECE) {
        let piece = &mut piece[..(bytes - at).min(PIECE as u64) as usize];
        old.read_exact_at(piece, at)?;
        for (page, content) in (0..).zip(piece.chunks(PAGE_BYTES)) {
            if content.iter().any(|byte| *byte != 0) {
                copy.write_all_at(content, at + page * PAGE_BYTES as u64)?;
            }
        }
    }
    Ok(copy)
}

/// Has QEMU use another file in place of the one of a RAM block.
fn exchange(
    qmp: &mut Qmp,
    pid: Pid,
    path: &Path,
    next: &Path,
    new: &File,
) -> Result<(), ResetError> {
    let mapped = || ResetError::Mapped { path: path.to_owned() };
    let bytes = new.metadata().map_err(file("look at", next))?.len();
    let range = mapping(pid, path).filter(|it| it.end - it.start == bytes);
    let range = range.ok_or_else(mapped)?;
    let number_of =
        |path: &Path| Ok::<_, ResetError>(list_fds(pid)?.into_iter().find(|it| it.target == path));
    let own = number_of(path)?.ok_or_else(mapped)?.number;
    qmp.execute_with_fd("getfd", json!({"fdname": PASSED}), new.as_fd())?;
    let exchanged = (|| {
        let passed = number_of(next)?.ok_or_else(mapped)?.number;
        map_over_in(pid, &range, passed)?;
        // What QEMU would map, or give back, by that number from now on.
        Ok::<_, ResetError>(duplicate_in(pid, passed, own)?)
    })();
    // By QEMU itself: closed behind its back, the number would be another file's the next time.
    qmp.execute("closefd", json!({"fdname": PASSED}))?;
    exchanged
}

/// Puts the names of RAM files right, of which one was being exchanged when who did it died.
///
/// # Errors
/// Where a file cannot be renamed or removed.
pub fn settle(record: &GuestRecord) -> Result<(), ResetError> {
    record.ram.iter().try_for_each(|ram| settle_file(Pid(record.process.pid), &ram.path))
}

fn settle_file(pid: Pid, path: &Path) -> Result<(), ResetError> {
    let next = next_path(path);
    match next.exists() {
        false => Ok(()),
        true if mapping(pid, &next).is_some() => {
            fs::rename(&next, path).map_err(file("rename", &next))
        }
        true => fs::remove_file(&next).map_err(file("remove", &next)),
    }
}

fn next_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".next");
    PathBuf::from(name)
}

/// Makes the file that is to take another one's place, with its owner.
fn make_next(old: &File, ram: &RamFile, next: &Path) -> Result<File, ResetError> {
    let _ = fs::remove_file(next);
    let mut how = OpenOptions::new();
    let new = how.read(true).write(true).create_new(true).mode(0o600).open(next);
    let new = new.map_err(file("create", next))?;
    let filled = (|| {
        let data = old.metadata()?;
        std::os::unix::fs::fchown(&new, Some(data.uid()), Some(data.gid()))?;
        new.set_len(data.len())?;
        if ram.bytes >= SHADOW.end {
            let mut shadow = vec![0; (SHADOW.end - SHADOW.start) as usize];
            old.read_exact_at(&mut shadow, SHADOW.start)?;
            new.write_all_at(&shadow, SHADOW.start)?;
        }
        Ok(())
    })();
    filled.map_err(|cause| {
        let _ = fs::remove_file(next);
        file("fill", next)(cause)
    })?;
    Ok(new)
}

/// Where a process has a file mapped: one range, without holes, from the file's beginning on.
fn mapping(pid: Pid, path: &Path) -> Option<Range<u64>> {
    let maps = Process::new(pid.0).ok()?.maps().ok()?;
    let mut whole: Option<Range<u64>> = None;
    for map in maps.into_iter().filter(|map| map.pathname == MMapPath::Path(path.to_owned())) {
        let (start, end) = map.address;
        let begun = whole.get_or_insert(start..start);
        if begun.end != start || map.offset != start - begun.start {
            return None;
        }
        begun.end = end;
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use dewar_kernel::WritableMapping;

    #[test]
    fn a_mapping_is_found_by_its_file() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a b");
        let own = Pid(std::process::id() as i32);
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.expect("file");
        file.set_len(1 << 20).expect("size");
        assert_eq!(mapping(own, &path), None);
        let _mapped = WritableMapping::new(&file, 1 << 20).expect("map");
        let range = mapping(own, &path).expect("mapped");
        assert_eq!(range.end - range.start, 1 << 20);
    }
}
