//! Putting a guest back as its journal says it was.

use crate::disks::{self, DiskError};
use crate::freeze;
use crate::handover::{self, HandoverError};
use crate::journal::Journal;
use crate::qmp::{Qmp, QmpError};
use crate::state::{self, StateError};
use dewar_registry::{GuestFolder, GuestRecord, Phase, RegistryError};
use serde_json::json;
use std::time::Duration;

/// How long the end of a process may take that does not answer any more: its
/// memory is freed first.
pub const END_WITHIN: Duration = Duration::from_secs(5);

pub(crate) const RUNNING: &str = "running";
/// What QEMU calls a guest that stands still since a disk of it could not be written.
pub(crate) const IO_ERROR: &str = "io-error";

/// Why a guest could not be put back.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Its migration.
    #[error(transparent)]
    State(#[from] StateError),
    /// A disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The journal.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A hand-over to another QEMU.
    #[error(transparent)]
    Handover(#[from] Box<HandoverError>),
}

/// Undoes whatever is under way with a guest, if anything is: first it runs
/// again, then its settings and its disks are put right. May be called at any
/// time and any number of times; each step looks at how things are.
///
/// # Errors
/// Where a step fails; the journal stays, and the next call goes on.
pub fn rollback(qmp: &mut Qmp, folder: &GuestFolder) -> Result<(), RecoverError> {
    let Some(mut journal) = Journal::load(folder)? else { return Ok(()) };
    if journal.stopping {
        state::cancel_migration(qmp)?;
    }
    resume(qmp, &journal)?;
    restore_settings(qmp, &journal)?;
    disks::abandon_making(qmp)?;
    for index in 0..journal.disks.len() {
        disks::abandon_copy(qmp, index)?;
        disks::settle(qmp, folder, &mut journal, index)?;
    }
    disks::release_files(qmp)?;
    retry_writes(qmp, &journal)?;
    Ok(Journal::close(folder)?)
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
        handover::settle(folder, record).map_err(Box::new)?;
        return Ok(());
    }
    if record.phase == Phase::Frozen {
        // Its memory and its state are kept; the process is of no use any more.
        let mut qmp = record.process.is_alive().then(connect).and_then(Result::ok);
        return freeze::end(folder, record, qmp.as_mut());
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
        return put_back_offline(folder);
    }
    let result =
        connect().map_err(RecoverError::from).and_then(|mut qmp| rollback(&mut qmp, folder));
    // A QEMU that is ending closes its socket before it is gone.
    if result.is_err() && record.process.ends_within(END_WITHIN) {
        return put_back_offline(folder);
    }
    result
}

/// The same where QEMU is gone: the disks' own files are made current.
pub(crate) fn put_back_offline(folder: &GuestFolder) -> Result<(), RecoverError> {
    let Some(mut journal) = Journal::load(folder)? else { return Ok(()) };
    for index in 0..journal.disks.len() {
        disks::settle_offline(folder, &mut journal, index)?;
    }
    Ok(Journal::close(folder)?)
}

/// Lets the guest run, if it ran before and we stopped it. Not where it stands still for
/// another reason: it was shut down, say, or its user has moved it elsewhere.
pub(crate) fn resume(qmp: &mut Qmp, journal: &Journal) -> Result<(), QmpError> {
    let is_ours = journal.was_running && journal.stopping || journal.held;
    // The last where it was reset meanwhile; one that was not let run yet is none of ours.
    let stands_still = ["paused", "finish-migrate", "postmigrate", "prelaunch"];
    if is_ours && stands_still.contains(&status(qmp)?.as_str()) {
        qmp.execute("cont", json!({}))?;
    }
    Ok(())
}

/// Lets the guest run whose writes found no room while they went to an overlay: they go
/// to its own disk again, and are made again.
fn retry_writes(qmp: &mut Qmp, journal: &Journal) -> Result<(), QmpError> {
    let is_ours = journal.was_running && journal.stopping && !journal.disks.is_empty();
    if is_ours && status(qmp)? == IO_ERROR {
        qmp.execute("cont", json!({}))?;
    }
    Ok(())
}

/// A journal of how a guest runs and of the settings that saving its state changes;
/// `bitmaps` says that dirty bitmaps of disks shall go along.
pub(crate) fn journal_of(qmp: &mut Qmp, bitmaps: bool) -> Result<Journal, QmpError> {
    Ok(Journal {
        was_running: is_running(qmp)?,
        capabilities: state::capabilities_to_change(qmp, bitmaps)?,
        tls_creds: state::tls_creds(qmp)?,
        bandwidth: state::bandwidth(qmp)?,
        ..Journal::default()
    })
}

/// Changes the settings that a journal notes, which must say that we are stopping the
/// guest.
pub(crate) fn change_settings(qmp: &mut Qmp, journal: &Journal) -> Result<(), QmpError> {
    let needed = journal.capabilities.iter().map(|(name, before)| (name.clone(), !before));
    state::set_capabilities(qmp, needed)?;
    if journal.tls_creds.is_some() {
        state::set_tls_creds(qmp, "")?;
    }
    if journal.bandwidth.is_some() {
        state::set_bandwidth(qmp, None)?;
    }
    Ok(())
}

fn restore_settings(qmp: &mut Qmp, journal: &Journal) -> Result<(), QmpError> {
    if journal.stopping {
        state::set_capabilities(qmp, journal.capabilities.iter().cloned())?;
        if let Some(id) = &journal.tls_creds {
            state::set_tls_creds(qmp, id)?;
        }
        if journal.bandwidth.is_some() {
            state::set_bandwidth(qmp, journal.bandwidth)?;
        }
    }
    // Only there where QEMU may not make a userfaultfd by itself.
    crate::guest::close_userfaultfd_device(qmp);
    Ok(())
}

/// Whether the vCPUs run.
pub(crate) fn is_running(qmp: &mut Qmp) -> Result<bool, QmpError> {
    Ok(status(qmp)? == RUNNING)
}

/// QEMU's word for how the guest is (`RunState` in its qapi/run-state.json).
pub(crate) fn status(qmp: &mut Qmp) -> Result<String, QmpError> {
    let told = qmp.execute("query-status", json!({}))?;
    Ok(told["status"].as_str().unwrap_or_default().to_owned())
}
