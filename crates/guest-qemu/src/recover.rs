//! Finishing whatever a dead command left under way with a guest, forward or back.

use crate::freeze;
use crate::handover::{self, HandoverError};
use crate::journal::Journal;
use crate::qmp::{Qmp, QmpError};
use crate::rollback::{END_WITHIN, RollbackError, put_back_offline, rollback};
use dewar_registry::{GuestFolder, GuestRecord, Phase, RegistryError};

/// Why a guest could not be put back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecoverError {
    /// What its journal says could not be undone.
    #[error(transparent)]
    Rollback(#[from] RollbackError),
    /// A hand-over to another QEMU.
    #[error(transparent)]
    Handover(#[from] Box<HandoverError>),
    /// The guest's folder.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// Undoes whatever is under way, or finishes it where it cannot be undone:
/// through QEMU if it answers, without it if it is gone or ending. The guest's
/// record may be another afterwards.
///
/// # Errors
/// As [`rollback`], and where a hand-over cannot be finished.
pub fn recover(
    connect: impl FnOnce() -> Result<Qmp, QmpError>,
    folder: &GuestFolder,
    record: &GuestRecord,
) -> Result<(), RecoverError> {
    if handover::is_under_way(folder) {
        // An inherited connection keeps others out.
        drop(connect());
        handover::recover(folder, record).map_err(Box::new)?;
        return Ok(());
    }
    if record.phase == Phase::Frozen {
        // Its memory and its state are kept; the process is of no use any more.
        let mut qmp = record.process.is_alive().then(connect).and_then(Result::ok);
        return Ok(freeze::end(folder, record, qmp.as_mut())?);
    }
    if !record.start_pending {
        // Of a freeze that was not finished, or a thaw that was.
        folder.remove_kept(&record.ram);
    }
    if Journal::load(folder)?.is_none() {
        return Ok(());
    }
    if !record.process.is_alive() {
        // The process that answers there now is another, of which the journal says nothing.
        return Ok(put_back_offline(folder)?);
    }
    let result =
        connect().map_err(RollbackError::from).and_then(|mut qmp| rollback(&mut qmp, folder));
    // A QEMU that is ending closes its socket before it is gone.
    if result.is_err() && record.process.ends_within(END_WITHIN) {
        return Ok(put_back_offline(folder)?);
    }
    Ok(result?)
}
