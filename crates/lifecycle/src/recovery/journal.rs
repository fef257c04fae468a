//! A checkpoint, a freeze or an upgrade that died: by the guest's journal (`dewar_guest_qemu::recover`).

use crate::failure::Failure;
use dewar_guest_qemu::{Qmp, recover as recover_qemu};
use dewar_registry::{GuestFolder, GuestRecord};

/// Brings QEMU and the disks back to what they were.
pub fn recover(folder: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    recover_qemu(|| Qmp::of(&record), folder, &record)?;
    // An upgrade may have moved the guest.
    Ok(folder.record()?)
}
