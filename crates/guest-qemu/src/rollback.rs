//! Putting a guest's QEMU, its settings and its disks back as its journal says they were.

use crate::disks::{self, DiskError};
use crate::journal::Journal;
use crate::qmp::{Qmp, QmpError};
use crate::run_state::{IO_ERROR, is_running, status};
use crate::state::{self, StateError};
use crate::uffd_access::close_userfaultfd_device;
use dewar_registry::{GuestFolder, RegistryError};
use serde_json::json;
use std::time::Duration;

/// How long the end of a process may take that does not answer any more: its
/// memory is freed first.
pub const END_WITHIN: Duration = Duration::from_secs(5);

/// Why a guest could not be put back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RollbackError {
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
}

/// Undoes whatever is under way with a guest, if anything is: first it runs
/// again, then its settings and its disks are put right. May be called at any
/// time and any number of times; each step looks at how things are.
///
/// # Errors
/// Where a step fails; the journal stays, and the next call goes on.
pub fn rollback(qmp: &mut Qmp, folder: &GuestFolder) -> Result<(), RollbackError> {
    let Some(mut journal) = Journal::load(folder)? else { return Ok(()) };
    if journal.stopping {
        state::cancel_migration(qmp)?;
    }
    resume(qmp, &journal)?;
    restore_settings(qmp, &journal)?;
    disks::mirror::abandon(qmp, journal.mirrors)?;
    disks::abandon_making(qmp)?;
    for index in 0..journal.disks.len() {
        disks::abandon_copy(qmp, index)?;
        disks::make_current(qmp, folder, &mut journal, index)?;
    }
    disks::release_files(qmp)?;
    retry_writes(qmp, &journal)?;
    Ok(Journal::close(folder)?)
}

/// The same where QEMU is gone: the disks' own files are made current.
pub(crate) fn put_back_offline(folder: &GuestFolder) -> Result<(), RollbackError> {
    let Some(mut journal) = Journal::load(folder)? else { return Ok(()) };
    for index in 0..journal.disks.len() {
        disks::make_current_offline(folder, &mut journal, index)?;
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
    close_userfaultfd_device(qmp);
    Ok(())
}
