//! What is kept of a frozen guest, and whether it is as it was.

use crate::failure::{Code, Failure};
use dewar_checkpoint::cores;
use dewar_guest_qemu::freeze::SUMS;
use dewar_guest_qemu::registry::{Frozen, GuestFolder, GuestRecord, Kept, Phase, RamFile};
use dewar_memory::{SUM_BYTES, sum, sums};
use std::fs::{self, File};
use std::path::Path;

/// The checksums of each RAM file, as they are kept.
pub fn sums_of(ram: &[RamFile]) -> Result<Vec<Vec<String>>, Failure> {
    ram.iter()
        .map(|file| {
            let failed = |error: &dyn std::fmt::Display| {
                Failure::new(Code::Failed, format!("{}: {error}", file.path.display()))
            };
            let opened = File::open(&file.path).map_err(|error| failed(&error))?;
            let sums = sums(&opened, file.bytes, cores()).map_err(|error| failed(&error))?;
            Ok(sums.iter().map(|sum| format!("{sum:032x}")).collect())
        })
        .collect()
}

/// Reads the state of a guest's devices, which has this checksum.
pub fn read_state(path: &Path, expected: &str) -> Result<Vec<u8>, Failure> {
    let bytes = fs::read(path).map_err(|error| {
        let what = format!("the state of its devices, {}: {error}", path.display());
        Failure::new(Code::Failed, what)
            .advice("if the machine was restarted its memory is lost: restore a checkpoint")
    })?;
    if format!("{:032x}", sum(&bytes)) == expected {
        return Ok(bytes);
    }
    let what = format!("the state of its devices, {}, was changed", path.display());
    Err(Failure::new(Code::Failed, what))
}

/// That each byte of the guest's memory is what it was.
pub fn check_memory(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    let changed = |what: String| {
        Failure::new(Code::Failed, format!("the memory of '{}' {what}", record.name))
            .advice("'dewar restore' brings back a checkpoint of it")
    };
    let before: Vec<Vec<String>> =
        folder.read(SUMS)?.ok_or_else(|| changed("has lost its checksums".to_owned()))?;
    let now = sums_of(&record.ram)?;
    for ((file, before), now) in record.ram.iter().zip(&before).zip(&now) {
        let differs = before.iter().zip(now).position(|(before, now)| before != now);
        let differs = differs.or((before.len() != now.len()).then_some(0));
        if let Some(index) = differs {
            let start = index as u64 * SUM_BYTES;
            let end = file.bytes.min(start + SUM_BYTES);
            return Err(changed(format!(
                "was changed while it was frozen: RAM '{}', bytes {start:#x} to {end:#x}",
                file.id
            )));
        }
    }
    if before.len() == record.ram.len() { Ok(()) } else { Err(changed("is incomplete".to_owned())) }
}

/// What has become of a guest whose QEMU died while `thaw` was about to let it
/// run: it is frozen as before, if its memory proves that it never ran. A guest
/// that ran for a moment must not begin again from an older state.
pub fn settle_unthawed(
    folder: &GuestFolder,
    mut record: GuestRecord,
) -> Result<GuestRecord, Failure> {
    let undecided = record.phase == Phase::Running && record.start_pending;
    if !undecided || record.process.is_alive() {
        return Ok(record);
    }
    let Some(Frozen { kept: Kept::InPlace { state, sum, sums }, .. }) = &record.frozen else {
        return Ok(record);
    };
    let never_ran =
        *sums && read_state(state, sum).is_ok() && check_memory(folder, &record).is_ok();
    if never_ran {
        record.phase = Phase::Frozen;
    } else {
        record.frozen = None;
    }
    record.start_pending = false;
    folder.set_record(&record)?;
    Ok(record)
}
