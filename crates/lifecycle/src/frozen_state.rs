//! What is kept of a frozen guest, and whether it is as it was.

use crate::failure::{Code, Failure};
use dewar_checkpoint::cores;
use dewar_guest_qemu::launch::last_words;
use dewar_memory::{SUM_BYTES, sum, sums};
use dewar_registry::{GuestFolder, GuestRecord, RamFile, SUMS_FILE};
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
        unreadable(path, &error).advice(
            "if the machine was restarted its memory is lost: 'dewar rm --force' gives it up, \
                 then 'dewar restore' brings back a checkpoint",
        )
    })?;
    if is_state(&bytes, expected) {
        return Ok(bytes);
    }
    let what = format!("the state of its devices, {}, was changed", path.display());
    Err(Failure::new(Code::Failed, what))
}

/// That each byte of the guest's memory is what it was.
pub fn check_memory(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    match difference(folder, record)? {
        None => Ok(()),
        Some(what) => {
            let what = format!("the memory of '{}' {what}", record.name);
            Err(Failure::new(Code::Failed, what).advice(
                "'dewar rm --force' gives it up, then 'dewar restore' brings back a checkpoint",
            ))
        }
    }
}

/// Whether bytes are the state that has this checksum.
pub fn is_state(bytes: &[u8], expected: &str) -> bool {
    format!("{:032x}", sum(bytes)) == expected
}

/// Says that the state of a guest's devices cannot be read.
pub fn unreadable(state: &Path, error: &std::io::Error) -> Failure {
    let what = format!("the state of its devices, {}: {error}", state.display());
    Failure::new(Code::Failed, what)
}

/// In what a guest's memory is not as it was.
pub fn difference(folder: &GuestFolder, record: &GuestRecord) -> Result<Option<String>, Failure> {
    let Some(before) = folder.read::<Vec<Vec<String>>>(SUMS_FILE)? else {
        return Ok(Some("has lost its checksums".to_owned()));
    };
    let now = sums_of(&record.ram)?;
    for ((file, before), now) in record.ram.iter().zip(&before).zip(&now) {
        let differs = before.iter().zip(now).position(|(before, now)| before != now);
        let differs = differs.or((before.len() != now.len()).then_some(0));
        if let Some(index) = differs {
            let start = index as u64 * SUM_BYTES;
            let end = file.bytes.min(start + SUM_BYTES);
            let id = &file.id;
            return Ok(Some(format!(
                "was changed while it was frozen: RAM '{id}', bytes {start:#x} to {end:#x}"
            )));
        }
    }
    Ok((before.len() != record.ram.len()).then(|| "is incomplete".to_owned()))
}

/// Why a QEMU does not take a guest's state; why it ended it says on its console alone.
pub fn unloadable(folder: &GuestFolder, error: &dyn std::fmt::Display) -> Failure {
    let log = folder.file("console.log");
    let said = last_words(&log)
        .map_or_else(String::new, |said| format!("; QEMU said, in {}: {said}", log.display()));
    Failure::new(Code::Failed, format!("loading the device state: {error}{said}"))
}
