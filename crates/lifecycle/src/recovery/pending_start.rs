//! A `restore` or `thaw` that died after its guest was loaded, and just before the guest was let run.

use crate::failure::Failure;
use crate::page_server::lacks_server;
use crate::process::qmp_failure;
use dewar_guest_qemu::{Incoming, IncomingError, QmpError};
use dewar_registry::{GuestFolder, GuestRecord, Phase};

/// What to do with a guest that its QEMU does not let run.
const CONT: &str = "mend what QEMU complains of, then 'dewar thaw' it if it is frozen, or let it run \
                    with QMP 'cont'; 'dewar stop --now' ends it";

/// Lets the guest run. A guest whose memory no page server brings is left alone: its QEMU may wait for
/// a page, and not answer. If QEMU refuses to run the guest, that is told once: a frozen guest
/// stays frozen, another stands as it is.
pub fn recover(folder: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    let is_pending = record.start_pending && record.phase == Phase::Running;
    if !is_pending || !record.process.is_alive() || lacks_server(folder, &record) {
        return Ok(record);
    }
    let silent = |error: &QmpError| qmp_failure(&record, error).attention();
    let mut guest =
        Incoming::resume(folder.clone(), record.clone()).map_err(|error| silent(&error))?;
    match guest.let_run(&|_| {}) {
        Ok(_) => Ok(guest.record().clone()),
        Err(IncomingError::NotStarted(error @ QmpError::Refused { .. })) => {
            let state = match guest.record().phase {
                Phase::Frozen => "it stays frozen",
                _ => "it is loaded and stands still",
            };
            Err(silent(&error).state(state).advice(CONT))
        }
        Err(IncomingError::NotStarted(error)) => Err(silent(&error)),
        Err(error) => Err(error.into()),
    }
}
