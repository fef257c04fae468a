//! A guest without a process: its RAM files stay where they are, the state of its
//! devices lies beside them, and QEMU has ended; and the way back.
//!
//! ```text
//!   running --stop, save--> journal: put back if we die --record says frozen--> QEMU ends
//!   frozen  --start, load-> record still says frozen    --record says running-> guest runs
//! ```
//!
//! The record decides; it is written in one step. Until it says `frozen`, the next command lets the
//! guest run again; from then on it ends QEMU. On the way back, a QEMU that was started before the
//! record said `running` never ran the guest: the next command ends it and starts over. After that the
//! QEMU may have run the guest. The kept files stay until the guest is known to run. If QEMU dies
//! before, the guest is frozen again only if its memory is, byte for byte, what it was.

use crate::cmdline::{
    RunPlan, TakeoverPlan, Unsupported, inherited, keep_truncated, require_sockets, take_over,
};
use crate::disks;
use crate::guest::QemuGuest;
use crate::handover::{
    HandoverError, named_ram, plan_on_its_ram, refuse_all_but_mirrors, refuse_another_user,
    refuse_other_files, refuse_other_network, refuse_what_is_under_way,
};
use crate::journal::Journal;
use crate::launch::{Inherited, LaunchError, Launched, end_strays, kill, launch};
use crate::machine::command_line::current_line;
use crate::machine::disks::{missing_file, stale_disk};
use crate::machine::forwards::forwards;
use crate::qmp::{Qmp, QmpError};
use crate::rollback::{END_WITHIN, RollbackError, change_settings, journal_of};
use crate::state::StateChannel;
use dewar_guest::Guest;
use dewar_kernel::huge_page_bytes;
use dewar_registry::{
    Descriptors, Forward, GuestFolder, GuestRecord, RamFile, STATE_FILE, THAWING_FILE,
};
use std::fs;
use std::path::PathBuf;

/// Where the state of a guest's devices goes that has this RAM: beside it, since
/// neither is worth anything without the other. A file system of huge pages takes no
/// such file; then into the guest's folder.
pub fn state_file(folder: &GuestFolder, ram: &[RamFile]) -> PathBuf {
    let first = ram.first().map(|file| &file.path);
    let huge = |path: &PathBuf| {
        let file = fs::File::open(path);
        file.is_ok_and(|file| huge_page_bytes(&file).is_ok_and(|bytes| bytes.is_some()))
    };
    match first.and_then(|path| path.parent()) {
        Some(beside) if !first.is_some_and(huge) => folder.ram_file(beside, STATE_FILE),
        _ => folder.file(STATE_FILE),
    }
}

/// That a guest could be thawed again, and nothing of it is under way. Returns
/// its record with its present command line and the whole paths of its RAM.
///
/// # Errors
/// [`HandoverError::Unsupported`] with the reason why it could not.
pub fn check(guest: &mut QemuGuest) -> Result<GuestRecord, HandoverError> {
    let mut record = guest.record().clone();
    let name = record.name.clone();
    let unfit = |why: String| HandoverError::Unsupported(name.clone(), why);
    refuse_what_is_under_way(guest)?;
    record.arguments = current_line(&mut guest.qmp, &record.arguments, &record.folder)
        .map_err(|error| unfit(error.to_string()))?;
    let stale = stale_disk(&mut guest.qmp, &record, &record.arguments)?;
    if let Some(why) = stale.or_else(|| missing_file(&record, &record.arguments)) {
        return Err(unfit(why));
    }
    if !record.program.is_file() {
        return Err(unfit(format!("{} is gone: upgrade it first", record.program.display())));
    }
    let machine = guest.found.machine.clone();
    let plan = plan(&guest.folder, &record, &machine).map_err(|why| unfit(why.to_string()))?;
    if record.arguments.iter().any(|word| word.contains("discard-data=on")) {
        return Err(unfit("its RAM has discard-data, and ends with QEMU".to_owned()));
    }
    record.ram = named_ram(&record, &plan).map_err(unfit)?;
    Ok(record)
}

/// That the QEMU which thaws it in place has the rights of this one, and finds its files and
/// its network.
///
/// # Errors
/// [`HandoverError::Unsupported`] where it is another user's, or in other namespaces.
pub fn check_place(guest: &QemuGuest) -> Result<(), HandoverError> {
    refuse_another_user(guest.record())?;
    refuse_other_files(guest)?;
    refuse_other_network(guest.record())
}

/// Stops a guest that is as `checked` says ([`check`]), lets so many copies of its disks to another host
/// end, and returns the state of its devices. It stands still then, until [`Guest::rollback`] or [`end_process`].
/// `before` is done just before it is stopped.
///
/// # Errors
/// Where it fails; the guest is to be put back.
pub fn stop_and_save(
    guest: &mut QemuGuest,
    checked: &GuestRecord,
    mirrors: usize,
    before: impl FnOnce(),
) -> Result<Vec<u8>, HandoverError> {
    guest.flush()?;
    match mirrors {
        0 => refuse_what_is_under_way(guest)?,
        _ => refuse_all_but_mirrors(guest)?,
    }
    let (folder, qmp) = (guest.folder.clone(), &mut guest.qmp);
    let journal = Journal { stopping: true, mirrors, ..journal_of(qmp, false)? };
    journal.save(&folder)?;
    change_settings(qmp, &journal)?;
    let channel = StateChannel::open(qmp)?;
    before();
    guest.stop()?;
    disks::mirror::finish(&mut guest.qmp, mirrors)?;
    crate::handover::refuse_what_changed(guest, &checked.arguments)?;
    Ok(channel.save(&mut guest.qmp)?)
}

/// Ends the process of a guest that is on record as frozen.
///
/// # Errors
/// Where the journal cannot be closed.
pub fn end_process(guest: &mut QemuGuest, record: &GuestRecord) -> Result<(), RollbackError> {
    end(&guest.folder, record, Some(&mut guest.qmp))
}

/// The same over any connection to it.
pub(crate) fn end(
    folder: &GuestFolder,
    record: &GuestRecord,
    qmp: Option<&mut Qmp>,
) -> Result<(), RollbackError> {
    let socket = folder.file("qmp.sock");
    if record.process.is_alive() {
        // Asked, it takes its sockets, its pid file and its network down.
        if let Some(qmp) = qmp {
            let _ = qmp.execute("quit", serde_json::json!({}));
        }
        if !record.process.ends_within(END_WITHIN) {
            kill(&record.process);
        }
    }
    if socket.exists() || folder.file(THAWING_FILE).exists() {
        // Of a QEMU that was to thaw it.
        end_strays(&socket, None);
        let _ = fs::remove_file(&socket);
        let _ = fs::remove_file(folder.file(THAWING_FILE));
    }
    Ok(Journal::close(folder)?)
}

fn plan(folder: &GuestFolder, record: &GuestRecord, machine: &str) -> Result<RunPlan, Unsupported> {
    let scratch = folder.file("");
    // Nobody has them for the QEMU that comes later.
    if let Some(option) = inherited(&record.arguments) {
        let why = format!("-{option}: its descriptors came from another");
        return Err(Unsupported(why));
    }
    let none = Descriptors::new();
    let TakeoverPlan { line, .. } =
        take_over(&record.arguments, &record.folder, &scratch, None, &none)?;
    let mut run = plan_on_its_ram(&line, record, machine, &folder.file("qmp.sock"))?;
    if record.frozen.as_ref().is_some_and(|frozen| frozen.forwards.is_some()) {
        // When it is loaded, those that it had.
        run.forward_nothing()?;
    }
    Ok(run)
}

/// Starts a QEMU on a frozen guest's RAM, waiting for its state.
///
/// # Errors
/// Where it does not start; the guest stays frozen.
pub fn start(
    folder: &GuestFolder,
    record: &GuestRecord,
    machine: &str,
) -> Result<Launched, HandoverError> {
    let socket = folder.file("qmp.sock");
    let begun = folder.file(THAWING_FILE);
    if begun.exists() {
        // Of a thaw that was killed.
        end_strays(&socket, None);
    }
    for file in &record.ram {
        let there = fs::metadata(&file.path).is_ok_and(|data| data.len() == file.bytes);
        if !there {
            let why = format!("its RAM {} is gone, or of another size", file.path.display());
            return Err(HandoverError::Unsupported(record.name.clone(), why));
        }
    }
    let run = plan(folder, record, machine)
        .map_err(|why| HandoverError::Unsupported(record.name.clone(), why.to_string()))?;
    require_sockets(&record.arguments, &record.folder)
        .map_err(|why| HandoverError::Unsupported(record.name.clone(), why.to_string()))?;
    keep_truncated(&record.arguments, &record.folder).map_err(|error| {
        let why = format!("what QEMU would truncate cannot be kept: {error}");
        HandoverError::Unsupported(record.name.clone(), why)
    })?;
    fs::write(&begun, []).map_err(|cause| {
        let (operation, path) = ("create", begun);
        LaunchError::File { operation, path, cause }
    })?;
    let log = folder.file("console.log");
    Ok(launch(&record.program, &run, &record.folder, &log, &socket, Inherited::default())?)
}

/// The ports that a guest's user-mode networks forward now, whether by its command line or later: its
/// command line does not say all of them.
///
/// # Errors
/// Where QEMU does not answer.
pub fn forwarded(guest: &mut QemuGuest) -> Result<Vec<Forward>, QmpError> {
    forwards(&mut guest.qmp)
}
