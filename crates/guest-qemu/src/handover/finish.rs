//! The end of a hand-over: forward, where the guest has moved, or back.

use super::error::HandoverError;
use super::tap;
use super::under_way::{FILE, Handover, SOCKET, Stage};
use crate::cmdline::{Later, Rename};
use crate::journal::Journal;
use crate::launch::kill;
use crate::machine::forwards;
use crate::qmp::{Qmp, QmpError, monitor};
use crate::rollback::{END_WITHIN, rollback};
use crate::state;
use dewar_registry::{GuestFolder, GuestRecord};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, openat, statat};
use rustix::process::geteuid;
use serde_json::{Value, json};
use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A guest that has moved.
#[derive(Debug)]
pub struct Moved {
    /// Its record now; it tells what could not be given to the new QEMU.
    pub record: GuestRecord,
    /// How long the guest stood still, as the old QEMU counts it.
    pub downtime_ms: Option<u64>,
    /// Its new QEMU's version.
    pub version: Option<String>,
}

/// Goes on to the end: the guest is in the new QEMU. `before_end` is called when
/// the old one has stopped for good and is still there.
pub(super) fn forward(
    folder: &GuestFolder,
    mut handover: Handover,
    mut old: Option<&mut Qmp>,
    new: Option<Qmp>,
    before_end: &mut dyn FnMut(),
) -> Result<Moved, HandoverError> {
    handover.stage = Stage::Moved;
    if let Err(error) = handover.save(folder) {
        // It has moved all the same: the next command goes on with it, and until then
        // nobody may let the old one run.
        kill(&handover.old);
        return Err(error.into());
    }
    let mut problems = Vec::new();
    let mut new = new.or_else(|| handover.connect_new(folder));
    if new.is_none() && handover.new.is_some_and(|new| !new.ends_within(END_WITHIN)) {
        // It has the guest, and only does not answer: the next command goes on.
        return Err(HandoverError::Qmp(QmpError::Busy));
    }
    if let Some(new) = new.as_mut().filter(|_| !handover.forwards.is_empty()) {
        // Asked for them: the end of a process with much memory takes a while.
        let released = old.as_deref_mut().map(|old| forwards::remove(old, &handover.forwards));
        if !matches!(released, Some(Ok(()))) {
            kill(&handover.old);
        }
        match forwards::add(new, &handover.forwards) {
            Ok(refused) => problems.extend(refused),
            Err(error) => problems.push(format!("forwarded ports: {error}")),
        }
    }
    for Rename { aside, own } in &handover.renames {
        own_alike(own, aside);
        match fs::rename(aside, own) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            // Without this one no command reaches the guest: the next one tries again.
            Err(error) if *own == handover.next.qmp => {
                kill(&handover.old);
                return Err(dewar_registry::io_error("rename", aside)(error).into());
            }
            Err(error) => {
                problems.push(format!("{} has no new owner: {error}", own.display()));
            }
            _ => {}
        }
    }
    let report = old.and_then(|old| old.execute("query-migrate", json!({})).ok());
    let downtime_ms = report.and_then(|report| report["downtime"].as_u64());
    before_end();
    if !kill(&handover.old) {
        // The next command tries again: it would not know of it otherwise.
        return Err(HandoverError::Lingers(handover.old.pid));
    }
    handover.renames.iter().for_each(remove_unanswered);
    let mut version = None;
    if let Some(new) = &mut new {
        version = crate::discover::version(new).ok();
        for later in &handover.later {
            problems.extend(open_later(new, later));
        }
        // They matter to the user's next migration only.
        let _ = restore_settings(new, &handover);
    }
    let mut next = handover.next;
    next.process = handover.new.unwrap_or(next.process);
    next.not_handed_over = problems;
    folder.set_record(&next)?;
    Journal::close(folder)?;
    folder.remove(FILE)?;
    Ok(Moved { record: next, downtime_ms, version })
}

/// Removes the socket by whose name the old QEMU had what it could not rename.
fn remove_unanswered(Rename { own, .. }: &Rename) {
    for end in crate::cmdline::ASIDE {
        let path = PathBuf::from(format!("{}{end}", own.display()));
        let is_socket = fs::symlink_metadata(&path).is_ok_and(|it| it.file_type().is_socket());
        let answers = || UnixStream::connect(&path).map_err(|error| error.kind());
        if is_socket && matches!(answers(), Err(ErrorKind::ConnectionRefused)) {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Gives what was made aside the owner and the rights of what it takes the place of:
/// somebody may have let others use that socket. Where it may not, it is as after a
/// restart.
///
/// The folder may be somebody else's, who puts other things there meanwhile: it is opened
/// once, and only what we, or a QEMU with our rights, made under one name is changed.
fn own_alike(own: &Path, aside: &Path) -> Option<()> {
    let at = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = own.parent().filter(|folder| aside.parent() == Some(folder))?;
    let folder = rustix::fs::open(folder, at | OFlags::DIRECTORY, Mode::empty()).ok()?;
    let before = statat(&folder, own.file_name()?, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    let made = openat(&folder, aside.file_name()?, at, Mode::empty()).ok()?;
    let now = fstat(&made).ok()?;
    let kind = |mode: u32| FileType::from_raw_mode(mode);
    let is_ours = now.st_uid == geteuid().as_raw() && now.st_nlink == 1;
    if !is_ours || kind(now.st_mode) != kind(before.st_mode) {
        return None;
    }
    let path = format!("/proc/self/fd/{}", made.as_raw_fd());
    let _ = std::os::unix::fs::chown(&path, Some(before.st_uid), Some(before.st_gid));
    fs::set_permissions(&path, fs::Permissions::from_mode(before.st_mode & 0o777)).ok()
}

/// Opens what the old QEMU has let go of; returns what was said against it.
fn open_later(new: &mut Qmp, later: &Later) -> Option<String> {
    match later {
        Later::Monitor(line) => match monitor(new, line) {
            Ok(said) if said.trim().is_empty() || said.contains("Waiting for") => None,
            Ok(said) => Some(said.trim().to_owned()),
            Err(error) => Some(error.to_string()),
        },
        Later::Vnc(addresses) => {
            let arguments = json!({"type": "vnc", "addresses": addresses});
            new.execute("display-update", arguments).err().map(|error| error.to_string())
        }
    }
}

/// Gives the new QEMU the migration settings that the old one had, as far as it
/// knows them.
fn restore_settings(new: &mut Qmp, handover: &Handover) -> Result<(), HandoverError> {
    let known = new.execute("query-migrate-capabilities", json!({}))?;
    let before = handover.capabilities.as_array();
    let of = |name: &Value| before?.iter().find(|it| &it["capability"] == name);
    let changed = known.as_array().into_iter().flatten().filter_map(|now| {
        let before = of(&now["capability"])?;
        let differs = before["state"] != now["state"];
        differs
            .then(|| Some((now["capability"].as_str()?.to_owned(), before["state"].as_bool()?)))?
    });
    let mut changed: Vec<_> = changed.collect();
    // Some are refused while others are on.
    changed.sort_by_key(|(_, is_on)| *is_on);
    for setting in changed {
        // One by one: what a newer QEMU refuses must not keep the others away.
        let _ = state::set_capabilities(new, [setting]);
    }
    let known = new.execute("query-migrate-parameters", json!({}))?;
    let before = handover.parameters.as_object().into_iter().flatten();
    for (name, value) in before.filter(|(name, value)| known.get(name.as_str()) != Some(*value)) {
        if known.get(name).is_some() {
            let _ = new.execute("migrate-set-parameters", json!({name: value}));
        }
    }
    Ok(())
}

/// Goes back: the guest is in the old QEMU, and stays there.
pub(super) fn back(
    folder: &GuestFolder,
    handover: &Handover,
    old: Option<&mut Qmp>,
) -> Result<(), HandoverError> {
    end_strays(folder, handover);
    if handover.stage != Stage::Starting {
        // If what follows fails: the command that tries again must not ask where the
        // guest is. A full disk must not keep it from running.
        let _ = Handover { stage: Stage::Starting, ..handover.clone() }.save(folder);
    }
    tap::restore(&handover.old, &handover.taps);
    for Rename { aside, .. } in &handover.renames {
        let _ = fs::remove_file(aside);
    }
    let put = match old {
        Some(qmp) => rollback(qmp, folder),
        None => Ok(()),
    };
    match put {
        // A QEMU that is ending closes its socket before it is gone.
        Err(error) if !handover.old.ends_within(END_WITHIN) => return Err(Box::new(error).into()),
        _ if handover.old.is_alive() && Journal::load(folder)?.is_some() => {
            return Err(HandoverError::Qmp(QmpError::Busy));
        }
        _ => Journal::close(folder)?,
    }
    Ok(folder.remove(FILE)?)
}

/// Ends the new QEMU, also one whose starter died before it could note it: its
/// command line names our socket.
fn end_strays(folder: &GuestFolder, handover: &Handover) {
    if let Some(new) = &handover.new {
        kill(new);
        return;
    }
    // The old one was itself started so, if it has the guest from a hand-over.
    crate::launch::end_strays(&folder.file(SOCKET), Some(&handover.old));
}
