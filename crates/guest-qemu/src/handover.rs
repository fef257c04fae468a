//! Moving a running guest from one QEMU to another on the same RAM.
//!
//! The new QEMU is started on the RAM files, waiting. QEMU's own migration,
//! with `x-ignore-shared`, carries the rest over a socket whose two ends the
//! two processes hold: once begun it ends well without us. The new one lets
//! the vCPUs run by itself; the old one stops them before it sends the end of
//! the stream, and has given up its disks by then.
//!
//! ```text
//!  Starting   the guest is the old QEMU's; the new one is being started or ended
//!     |  ^
//!     |  '---  the new QEMU is dead, and never ran the guest
//!     v  |
//!  Moving     the stream was begun -- the old QEMU stops, the new one loads --
//!     |       the new QEMU says RESUME: this is the hand-over
//!     v
//!  Moved      what belongs to the guest is given to the new one; the old ends
//! ```
//!
//! **Never both, never none.** A stream without its end is never run, and the
//! old QEMU goes on by itself if it cannot send the end. Once the end is sent,
//! the old QEMU stands still until it is told to run. Dewar tells it so only if
//! the new QEMU is dead and never resumed the guest. It knows that by the events
//! on a connection that was there before the stream began
//! ([`Qmp::has_resumed`]), or by the old QEMU's word that the stream is not
//! complete. (QEMU's return path would have the old one resume on its own when
//! the new one dies; but the new one lets the guest run *before* it answers
//! there, and a guest that wrote to its memory for a moment must not go on
//! from an older state.) So the migration is never cancelled while the new
//! QEMU lives.
//!
//! Which stage was reached is in `handover.json`. If the command dies, the guardian or
//! the next command goes on to the end, or back ([`settle`]). The old QEMU is ended
//! by SIGKILL: asked to quit, it would remove sockets and pid files that are
//! the new one's by then, and run scripts that take the guest's network down.

mod bus_addresses;
mod command_line;
mod defaults;
mod disks;
mod ejected_media;
mod forwards;
mod hotplug;
mod inherited_files;
mod outcome;
mod plan;
mod roms;
mod switch;
mod tap;

pub(crate) use command_line::current_line;
pub(crate) use disks::{changed_medium, missing_file, stale_disk, unrestorable_disk};
pub(crate) use forwards::{add as add_forwards, forwards};
pub use inherited_files::OpenFilesError;
pub use plan::Plan;
pub(crate) use plan::{
    ASLEEP, is_same_namespace, named_ram, plan_on_its_ram, refuse_another_user, refuse_other_files,
    refuse_other_network, refuse_what_changed, refuse_what_is_under_way,
};
pub use switch::{Moved, Waiting};

use crate::cmdline::{Later, Rename};
use crate::journal::Journal;
use crate::launch::{LaunchError, kill};
use crate::qmp::{Qmp, QmpError, monitor};
use crate::recover::{END_WITHIN, RecoverError, rollback};
use crate::state::{self, StateError};
use dewar_guest::GuestError;
use dewar_registry::{Forward, GuestFolder, GuestRecord, ProcessId, RegistryError};
use outcome::Outcome;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, openat, statat};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use tap::TapHeader;

const FILE: &str = "handover.json";
/// Dewar's socket of the new QEMU, until it has the guest.
const SOCKET: &str = "qmp.sock~";

/// Why a guest could not be handed over.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// It cannot be; nothing was touched.
    #[error("{0} cannot be handed over: {1}")]
    Unsupported(String, String),
    /// The new QEMU does not start.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The new QEMU is not what the guest needs.
    #[error("{} {why}", program.display())]
    Unfit {
        /// The new program.
        program: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The new QEMU could not load the guest's state.
    #[error("{} did not take the guest over: {why}", program.display())]
    Refused {
        /// The new program.
        program: PathBuf,
        /// What it said.
        why: String,
    },
    /// The guest moved, and ended there.
    #[error("the new QEMU took the guest over and ended at once; the guest has crashed")]
    Crashed,
    /// The guest moved, and not all of it could be put in order.
    #[error("the guest moved to its new QEMU, but: {0}")]
    Unfinished(Box<HandoverError>),
    /// The guest moved, and its old QEMU is still there.
    #[error("its old QEMU, process {0}, which stands still, does not end")]
    Lingers(i32),
    /// Everybody who could tell whether the guest ran in the new QEMU is gone.
    #[error(
        "the new QEMU of {0} ended in the hand-over, and nobody saw whether the guest ran in it; \
         the old one, process {1}, stands still"
    )]
    Unknown(String, i32),
    /// The guest.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// A QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// A migration.
    #[error(transparent)]
    State(#[from] StateError),
    /// The guest's folder.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Putting the old QEMU back.
    #[error(transparent)]
    PutBack(#[from] Box<RecoverError>),
}

/// How far a hand-over has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Stage {
    Starting,
    Moving,
    Moved,
}

/// A hand-over under way, as it is kept on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Handover {
    stage: Stage,
    /// The QEMU that gives the guest up.
    old: ProcessId,
    /// Dewar's socket of it, as long as it has the guest.
    old_socket: PathBuf,
    /// The new QEMU, when it is known.
    new: Option<ProcessId>,
    /// The guest's record from the hand-over on, but for its process.
    next: GuestRecord,
    was_running: bool,
    renames: Vec<Rename>,
    later: Vec<Later>,
    forwards: Vec<Forward>,
    /// The old QEMU's taps, as they were.
    taps: Vec<TapHeader>,
    /// The migration settings that users see: capabilities and parameters.
    capabilities: Value,
    parameters: Value,
}

impl Handover {
    fn load(folder: &GuestFolder) -> Result<Option<Self>, RegistryError> {
        folder.read(FILE)
    }

    fn save(&self, folder: &GuestFolder) -> Result<(), RegistryError> {
        folder.write(FILE, self)
    }

    fn connect_old(&self) -> Option<Qmp> {
        Qmp::connect_to(&self.old_socket, &self.old).ok()
    }

    /// Connects to the new QEMU, under whichever name its socket has by now.
    fn connect_new(&self, folder: &GuestFolder) -> Option<Qmp> {
        let new = self.new.as_ref()?;
        let connect = |socket: &Path| Qmp::connect_to(socket, new).ok();
        connect(&folder.file(SOCKET)).or_else(|| connect(&self.next.qmp))
    }
}

/// Whether a hand-over was begun and not finished.
pub(crate) fn is_under_way(folder: &GuestFolder) -> bool {
    folder.file(FILE).exists()
}

/// The processes that a hand-over under way may have the guest in, for somebody who ends
/// all of them.
pub fn processes(folder: &GuestFolder) -> Vec<ProcessId> {
    let handover = Handover::load(folder).ok().flatten();
    handover.map_or_else(Vec::new, |it| [Some(it.old), it.new].into_iter().flatten().collect())
}

/// Finishes a hand-over that a dead command left, if there is one: forward
/// where the guest has moved, back where it has not.
///
/// # Errors
/// [`HandoverError::Unknown`] where it cannot be known; both are left as they
/// are then.
pub fn settle(folder: &GuestFolder, record: &GuestRecord) -> Result<(), HandoverError> {
    let Some(handover) = Handover::load(folder)? else { return Ok(()) };
    let mut old = handover.connect_old();
    let outcome = match handover.stage {
        Stage::Starting => Outcome::Stayed,
        Stage::Moved => Outcome::Moved(None),
        Stage::Moving => outcome::outcome(&handover, folder, old.as_mut(), None),
    };
    match outcome {
        Outcome::Moved(new) => forward(folder, handover, old.as_mut(), new, &mut || {}).map(drop),
        Outcome::Stayed => back(folder, &handover, old.as_mut()),
        Outcome::Unknown => Err(HandoverError::Unknown(record.name.clone(), handover.old.pid)),
    }
}

/// Goes on to the end: the guest is in the new QEMU. `before_end` is called when
/// the old one has stopped for good and is still there.
fn forward(
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
    let told = old.and_then(|old| old.execute("query-migrate", json!({})).ok());
    let downtime_ms = told.and_then(|told| told["downtime"].as_u64());
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
fn back(
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
