//! Guests that were frozen for a reboot of the host which did not come.

use super::at_once::at_once;
use super::live_memory;
use super::note::{KeptGuest, Note, Stage};
use super::own_command::own_command;
use crate::failure::Failure;
use crate::host::Host;
use crate::reporter::Reporter;
use crate::thaw::{ThawOptions, is_frozen, thaw_in_place};
use dewar_hostreboot::kexec;
use dewar_registry::{Kept, RegistryError};
use std::process::Command;
use std::time::Duration;

/// How long another command may have a guest.
const PATIENCE: Duration = Duration::from_secs(5);

/// Lets guests go on that a reboot of the host froze whose command died before the host was rebooted. Says what of
/// that failed; the next command tries again then.
///
/// # Errors
/// Where the note cannot be read or removed.
pub fn recover(host: &Host, reporter: &dyn Reporter) -> Result<Vec<Failure>, Failure> {
    if !Note::load(host)?.is_some_and(|note| note.is_before_reboot()) {
        return Ok(Vec::new());
    }
    // Who has the lock is at work on it.
    let _lock = match host.registry.lock_host() {
        Ok(lock) => lock,
        Err(RegistryError::Busy(_)) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    // It may have been dealt with meanwhile.
    let Some(note) = Note::load(host)?.filter(Note::is_before_reboot) else {
        return Ok(Vec::new());
    };
    if note.command.is_alive() || is_going_down(&note) {
        return Ok(Vec::new());
    }
    undo(host, &note, reporter)
}

/// Whether the init system goes on with it.
fn is_going_down(note: &Note) -> bool {
    let is_stopping = || {
        let state = Command::new("systemctl").arg("is-system-running").output();
        state.is_ok_and(|output| output.stdout.starts_with(b"stopping"))
    };
    note.by_init && (note.stage == Stage::HandedOver || is_stopping())
}

/// Lets all guests of a note go on, and has no kernel loaded any more. The note is removed where nothing failed.
///
/// # Errors
/// Where the note cannot be removed.
pub fn undo(host: &Host, note: &Note, reporter: &dyn Reporter) -> Result<Vec<Failure>, Failure> {
    let thaw = |kept: &KeptGuest| thaw_kept(host, kept, reporter);
    let mut failures: Vec<Failure> =
        at_once(&note.guests, thaw).into_iter().filter_map(Result::err).collect();
    live_memory::leave_to_qemu(host, note);
    for name in &note.others {
        if is_in_store(host, name) {
            failures.extend(own_command(host, ["thaw", name]).err());
        }
    }
    // A later reboot must not start it.
    let _ = kexec::unload();
    if failures.is_empty() {
        Note::remove(host)?;
    }
    Ok(failures)
}

fn thaw_kept(host: &Host, kept: &KeptGuest, reporter: &dyn Reporter) -> Result<(), Failure> {
    let guest = host.lock_within(&kept.name, PATIENCE)?;
    let Some(frozen) = is_frozen(&guest.record).cloned() else { return Ok(()) };
    if !matches!(frozen.kept, Kept::InPlace { .. }) {
        return Ok(());
    }
    let options = ThawOptions { force: false, keep_clock: false };
    thaw_in_place(guest, &frozen, options, reporter).map(drop)
}

/// Whether a guest is frozen in a store.
pub(super) fn is_in_store(host: &Host, name: &str) -> bool {
    let record = host.registry.guest(name).and_then(|folder| folder.record());
    record.is_ok_and(|record| {
        is_frozen(&record).is_some_and(|frozen| matches!(frozen.kept, Kept::InStore { .. }))
    })
}
