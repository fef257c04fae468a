//! What a dead command left with a guest is finished by the next command that looks at it.
//!
//! Each feature that can leave something has one step in the list `STEPS`. Some steps lie here, the others in
//! their feature's module. A step looks at the guest's folder and record; where it finds nothing of its
//! feature, it does nothing. It may be tried again any number of times: a command can die in it, too.

mod journal;
pub(crate) mod migration;
mod pending_start;
pub mod replaced;
mod unthawed;

pub use unthawed::recover_unthawed;

use crate::container_process;
use crate::failure::Failure;
use crate::held_ram;
use crate::migration::is_elsewhere;
use crate::served_disks;
use dewar_registry::{GuestFolder, GuestRecord};

/// Finishes what one feature left; returns the guest's record as it is then.
type RecoveryStep = fn(&GuestFolder, GuestRecord) -> Result<GuestRecord, Failure>;

/// In this order: without its disks a QEMU may not answer; then QEMU and the disks are put right, and the others look
/// at what that left.
const STEPS: [RecoveryStep; 5] = [
    served_disks::recover,
    journal::recover,
    replaced::recover,
    recover_unthawed,
    held_ram::recover,
];

/// Finishes what a dead command left with a guest. The caller has the guest's lock.
///
/// # Errors
/// Where a step fails; the next command tries again.
pub fn recover(folder: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    // First of all: of a guest that another host may have nothing is touched here.
    let record = migration::recover(folder, record)?;
    if is_elsewhere(&record) {
        return Ok(record);
    }
    if container_process::recover(folder, &record)? {
        return Ok(folder.record_if_any()?.unwrap_or(record));
    }
    STEPS.iter().try_fold(record, |record, step| step(folder, record))
}

/// The same for a guest that is to go on: one whose command died before it let the guest run is let
/// run.
///
/// # Errors
/// As [`recover`].
pub fn recover_and_start(
    folder: &GuestFolder,
    record: GuestRecord,
) -> Result<GuestRecord, Failure> {
    pending_start::recover(folder, recover(folder, record)?)
}
