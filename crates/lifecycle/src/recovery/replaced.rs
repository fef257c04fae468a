//! The dead guest whose place a restore takes: its record and its disks are kept until the new
//! guest is loaded.
//!
//! ```text
//!  keep      guest.json is noted in replaced.json; then disk-N.qcow2 -> disk-N.qcow2.old
//!     |        the restore dies or fails before its guest is loaded: put back
//!     v        its guest is loaded, and may run from now on: forgotten
//! ```
//!
//! `replaced.json` is written first and removed last. A command that finds it looks at the guest's
//! record. If the record names the dead guest's process, the restore came no further: the command puts
//! the dead guest back. If it says `restoring` and that QEMU lives, only a new `restore` or a `stop` may
//! end it. After that the new guest has its place, and the file is removed.

use crate::failure::{Code, Failure};
use crate::process::end_qemu;
use dewar_registry::{GuestFolder, GuestRecord, Phase};
use std::fs;
use std::path::{Path, PathBuf};

const FILE: &str = "replaced.json";

/// Notes the guest that is about to be replaced.
pub fn keep(folder: &GuestFolder, before: &GuestRecord) -> Result<(), Failure> {
    Ok(folder.write(FILE, before)?)
}

/// The guest that is being replaced, where one is.
pub fn kept(folder: &GuestFolder) -> Result<Option<GuestRecord>, Failure> {
    Ok(folder.read(FILE)?)
}

/// Finishes what a dead restore left, forward or back. A restore whose guest was being loaded is
/// left to [`end_unfinished`].
pub fn recover(folder: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    match kept(folder)? {
        Some(before) if record.process.is_same(&before.process) => rollback(folder)?,
        Some(_) if record.phase != Phase::Restoring => forget(folder)?,
        Some(_) if !record.process.is_alive() => end_unfinished(folder)?,
        _ => return Ok(record),
    }
    Ok(folder.record()?)
}

/// Ends a QEMU whose restore was cut short before it ran, and brings the guest back in
/// whose place it was to be.
pub fn end_unfinished(folder: &GuestFolder) -> Result<(), Failure> {
    if end_loading(folder)? { rollback(folder) } else { Ok(()) }
}

/// Ends a QEMU that is being loaded, and gives its memory back; says whether there was one.
pub fn end_loading(folder: &GuestFolder) -> Result<bool, Failure> {
    let record = folder.record_if_any()?;
    let Some(record) = record.filter(|it| it.phase == Phase::Restoring) else { return Ok(false) };
    if record.process.is_alive() {
        end_qemu(&record)?;
    }
    folder.remove_ram(&record)?;
    Ok(true)
}

/// Gives the guest that was not replaced its disks and its record back; where there was
/// none, none is left.
pub fn rollback(folder: &GuestFolder) -> Result<(), Failure> {
    for old in old_disks(folder)? {
        let renamed = fs::rename(&old, old.with_extension(""));
        renamed.map_err(|error| failed("rename", &old, &error))?;
    }
    match kept(folder)? {
        // Not where it is: there may be no room.
        Some(before) if folder.record()?.process.is_same(&before.process) => {}
        Some(before) => folder.set_record(&before)?,
        None => folder.remove("guest.json")?,
    }
    Ok(folder.remove(FILE)?)
}

/// Removes what is left of the guest that was replaced.
pub fn forget(folder: &GuestFolder) -> Result<(), Failure> {
    for old in old_disks(folder)? {
        fs::remove_file(&old).map_err(|error| failed("remove", &old, &error))?;
    }
    Ok(folder.remove(FILE)?)
}

/// The overlays of the guest before, under the names that they are kept by.
fn old_disks(folder: &GuestFolder) -> Result<Vec<PathBuf>, Failure> {
    let path = folder.file("");
    let files = fs::read_dir(&path).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let files = files.map_err(|error| failed("list", &path, &error))?;
    let names = files.iter().map(|file| file.file_name().to_string_lossy().into_owned());
    let is_old = |name: &String| name.starts_with("disk-") && name.ends_with(".old");
    Ok(names.filter(is_old).map(|name| folder.file(&name)).collect())
}

fn failed(operation: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(Code::Failed, format!("cannot {operation} {}: {error}", path.display()))
}
