//! A `thaw` whose QEMU died before the guest was known to run.

use crate::failure::Failure;
use crate::frozen_state::{difference, is_state, unreadable};
use dewar_registry::{Frozen, GuestFolder, GuestRecord, Kept, Phase};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// What has become of a guest whose QEMU died while `thaw` was about to let it
/// run: it is frozen as before, if its memory proves that it never ran. A guest
/// that ran for a moment must not begin again from an older state. Where its memory
/// cannot be read nothing is decided.
pub fn recover_unthawed(
    folder: &GuestFolder,
    mut record: GuestRecord,
) -> Result<GuestRecord, Failure> {
    let undecided = record.phase == Phase::Running && record.start_pending;
    if !undecided || record.process.is_alive() {
        return Ok(record);
    }
    let Some(Frozen { kept: Kept::InPlace { state, sum, sums, .. }, .. }) = &record.frozen else {
        return Ok(record);
    };
    let never_ran = *sums && is_whole(folder, &record, state, sum).map_err(Failure::attention)?;
    if never_ran {
        record.phase = Phase::Frozen;
    } else {
        record.frozen = None;
    }
    record.start_pending = false;
    folder.set_record(&record)?;
    Ok(record)
}

fn is_whole(
    folder: &GuestFolder,
    record: &GuestRecord,
    state: &Path,
    sum: &str,
) -> Result<bool, Failure> {
    let kept = match fs::read(state) {
        Ok(bytes) => is_state(&bytes, sum),
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(unreadable(state, &error)),
    };
    let is_there = record.ram.iter().all(|file| file.path.exists());
    Ok(kept && is_there && difference(folder, record)?.is_none())
}
