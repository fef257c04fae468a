//! Guests that were frozen for a reboot of the host which did not come.

use super::at_once::at_once;
use super::live_memory;
use super::note::{KeptGuest, Note};
use crate::failure::Failure;
use crate::host::Host;
use crate::reporter::Reporter;
use crate::thaw::{ThawOptions, is_frozen, thaw_in_place};
use dewar_hostreboot::kexec;
use dewar_registry::Kept;
use std::time::Duration;

/// Lets guests go on that a reboot of the host froze whose command died before the host was rebooted. Says what of
/// that failed.
///
/// # Errors
/// Where the note cannot be read or removed.
pub fn recover(host: &Host, reporter: &dyn Reporter) -> Result<Vec<Failure>, Failure> {
    let Some(note) = Note::load(host)? else { return Ok(Vec::new()) };
    if !note.is_before_reboot() || note.is_the_inits() || note.command.is_alive() {
        return Ok(Vec::new());
    }
    let failures = thaw_kept(host, &note, reporter);
    live_memory::leave_to_qemu(host, &note);
    // A later reboot must not start it.
    let _ = kexec::unload();
    Note::remove(host)?;
    Ok(failures)
}

/// Thaws the guests of a note that lie frozen where they were, all at once; returns what failed.
pub fn thaw_kept(host: &Host, note: &Note, reporter: &dyn Reporter) -> Vec<Failure> {
    let thaw = |kept: &KeptGuest| -> Result<(), Failure> {
        let guest = host.lock_within(&kept.name, Duration::from_secs(5))?;
        let Some(frozen) = is_frozen(&guest.record).cloned() else { return Ok(()) };
        if !matches!(frozen.kept, Kept::InPlace { .. }) {
            return Ok(());
        }
        let options = ThawOptions { force: false, keep_clock: false };
        thaw_in_place(guest, &frozen, options, reporter).map(drop)
    };
    at_once(&note.guests, thaw).into_iter().filter_map(Result::err).collect()
}
