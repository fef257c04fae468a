//! The processes of a guest: its QEMU, and the page server beside it.

use crate::failure::{Code, Failure};
use dewar_guest_qemu::launch::kill;
use dewar_guest_qemu::{Qmp, QmpError};
use dewar_registry::{GuestRecord, ProcessId};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// How long QEMU itself may take to end, and to answer that it will.
const QUIT_WITHIN: Duration = Duration::from_secs(2);
const SERVER_WITHIN: Duration = Duration::from_secs(3);
/// How often it is looked whether waiting is hopeless.
const LOOK: Duration = Duration::from_millis(200);

/// Connects to a guest's QEMU.
///
/// # Errors
/// Where it does not answer.
pub fn connect(record: &GuestRecord) -> Result<Qmp, Failure> {
    Qmp::of(record).map_err(|error| qmp_failure(record, &error))
}

/// Says that a guest's QEMU does not do as it is told.
pub fn qmp_failure(record: &GuestRecord, error: &QmpError) -> Failure {
    Failure::new(Code::Failed, format!("guest '{}': {error}", record.name))
}

/// Ends QEMU: by its own command, and by SIGKILL where it does not obey at once.
///
/// # Errors
/// Where the kernel does not let it end.
pub fn end_qemu(record: &GuestRecord) -> Result<(), Failure> {
    if !record.process.is_alive() {
        return Ok(());
    }
    let asked = Qmp::connect_to_within(&record.qmp, &record.process, QUIT_WITHIN)
        .and_then(|mut qmp| qmp.quit(QUIT_WITHIN));
    if asked.is_ok() && record.process.ends_within(QUIT_WITHIN) {
        return Ok(());
    }
    if kill(&record.process) {
        return Ok(());
    }
    let what = format!("process {} of '{}' does not end", record.process.pid, record.name);
    Err(Failure::new(Code::Attention, what)
        .state("it was killed, and the kernel still waits for it: for a disk, as a rule")
        .advice("try again when it is gone; its memory and its disks were left alone"))
}

/// Waits for the end of an ended guest's page server, which reads a checkpoint that could not be
/// deleted meanwhile. A server that waits for a far store takes longer, and is in nobody's way. A
/// server that was stopped (SIGSTOP) is ended.
pub fn await_page_server(record: &GuestRecord) {
    if let Some(server) = record.server {
        if server.is_halted() || !server.ends_within(SERVER_WITHIN) && server.is_halted() {
            kill(&server);
        }
    }
}

/// Does something that waits for a QEMU which has not run its guest, and may itself wait for a page that never
/// comes: it is ended as soon as that is hopeless.
pub(crate) fn unless_hopeless<T>(
    process: &ProcessId,
    is_hopeless: impl Fn() -> bool + Send,
    work: impl FnOnce() -> T,
) -> T {
    std::thread::scope(|scope| {
        let (working, done) = channel::<()>();
        scope.spawn(move || {
            while done.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if is_hopeless() {
                    kill(process);
                }
            }
        });
        let result = work();
        drop(working);
        result
    })
}
