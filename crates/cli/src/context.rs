//! What every verb starts from.

use crate::failure::{Code, Failure};
use crate::frozen_state::settle_unthawed;
use crate::output::{printable, tell};
use crate::progress::Progress;
use crate::ram_dir::usual_dirs;
use crate::replace_journal;
use crate::server::ServerState;
use crate::verbs::ps::server_alive;
use crate::verbs::stop::{await_server, end, would_lose};
use dewar_guest_qemu::handover;
use dewar_guest_qemu::launch::kill;
use dewar_guest_qemu::start_from_state::start;
use dewar_guest_qemu::{END_WITHIN, QemuGuest, Qmp, QmpError, RamRoom, recover};
use dewar_image::{Location, Store};
use dewar_kernel::KernelError;
use dewar_qos::Ledger;
use dewar_registry::{
    Frozen, GuestFolder, GuestLock, GuestRecord, Kept, Phase, Registry, RegistryError,
};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where it is noted who was promised CPU time of this host.
const HOST_LEDGER: &str = "/run/dewar/qos";
/// What was told of a guest with which something could not be finished.
const TROUBLE: &str = "trouble.json";
/// How long the pages of a guest may stay away before nobody waits for them.
const AWAY: Duration = Duration::from_secs(5);

/// Flags that hold for all verbs.
pub struct Context {
    pub registry: Registry,
    pub json: bool,
}

/// A guest that is ours to work on.
pub struct LockedGuest {
    pub folder: GuestFolder,
    pub record: GuestRecord,
    pub lock: GuestLock,
}

impl Context {
    pub fn new(root: &Path, json: bool) -> Self {
        Self { registry: Registry::new(root), json }
    }

    /// Prints the result: `json` for programs, `text` for people. Returns whether
    /// anybody reads it.
    pub fn print(&self, json: Value, text: &str) -> bool {
        match self.json {
            true => tell(json),
            false => tell(text.trim_end()),
        }
    }

    /// Prints a result of which not all may be as it should be, and ends so.
    pub fn print_with(
        &self,
        json: Value,
        text: &str,
        end: Result<(), Failure>,
    ) -> Result<(), Failure> {
        let json = match &end {
            Ok(()) => json,
            Err(failure) => failure.beside(json),
        };
        self.print(json, text);
        end.map_err(Failure::already_printed)
    }

    /// Where the store is that `url` means.
    pub fn store_location(&self, url: Option<&str>) -> Result<Location, Failure> {
        match url {
            None => Ok(Location::Folder(self.registry.default_store())),
            Some(url) => Ok(Location::parse(url)?),
        }
    }

    /// Who has been promised CPU time: of all roots of the host, where we may write there.
    pub fn qos_ledger(&self) -> Ledger {
        match rustix::process::geteuid().is_root() {
            true => Ledger::new(HOST_LEDGER).within(self.registry.tag()),
            false => Ledger::new(self.qos_folder()),
        }
    }

    /// Where controllers of this root have their sockets and logs.
    pub fn qos_folder(&self) -> PathBuf {
        self.registry.root().join("qos")
    }

    /// Opens a store that must exist.
    pub fn store(&self, url: Option<&str>) -> Result<Store, Failure> {
        let store = Store::open(&self.store_location(url)?)?;
        warn_of(&store);
        Ok(store)
    }

    /// Takes hold of a guest; what a dead command left with it is finished.
    pub fn hold(&self, name: &str) -> Result<LockedGuest, Failure> {
        self.hold_after(name, |_, _| Ok(()))
    }

    /// The same, after `first` did something for a guest whose QEMU may not be
    /// able to answer until then.
    pub fn hold_after(
        &self,
        name: &str,
        first: impl FnOnce(&GuestFolder, &mut GuestRecord) -> Result<(), Failure>,
    ) -> Result<LockedGuest, Failure> {
        self.hold_within(name, Duration::ZERO, first)
    }

    /// The same, where another command that has it may have so long to let it go.
    pub fn hold_within(
        &self,
        name: &str,
        patience: Duration,
        first: impl FnOnce(&GuestFolder, &mut GuestRecord) -> Result<(), Failure>,
    ) -> Result<LockedGuest, Failure> {
        let folder = self.registry.guest(name)?;
        folder.record()?;
        let lock = folder.lock_within(patience)?;
        // Read again: who held the lock may have changed it.
        let mut record = folder.record()?;
        first(&folder, &mut record)?;
        let record = start_if_pending(&folder, settle(&folder, record)?)?;
        Ok(LockedGuest { folder, record, lock })
    }

    /// Takes hold of a guest that is to be ended. Nothing is finished through its QEMU,
    /// which may not answer: see [`LockedGuest::end`].
    pub fn hold_to_end(&self, name: &str) -> Result<LockedGuest, Failure> {
        let folder = self.registry.guest(name)?;
        folder.record()?;
        let lock = folder.lock()?;
        let record = folder.record()?;
        Ok(LockedGuest { folder, record, lock })
    }

    /// What there is for the RAM of guest `name` in a folder. With `overcommit` there is
    /// always enough.
    pub fn ram_room(
        &self,
        name: &str,
        folder: &Path,
        overcommit: bool,
    ) -> Result<RamRoom, KernelError> {
        if overcommit {
            return Ok(RamRoom { free: u64::MAX, promised: 0 });
        }
        // One that a command works on may be about to come back, in files of the same names.
        let ended = |(folder, record): &(GuestFolder, GuestRecord)| {
            record.name != name
                && record.frozen.is_none()
                && !record.process.is_alive()
                && folder.lock().is_ok()
        };
        // Of guests that cannot be listed all counts.
        let ended = self.guests().unwrap_or_default().into_iter().filter(ended);
        let files = ended.flat_map(|(_, record)| record.owned_ram).collect();
        RamRoom::look(folder, &usual_dirs(), &files)
    }

    /// All guests with their records; one that is removed meanwhile is none.
    pub fn guests(&self) -> Result<Vec<(GuestFolder, GuestRecord)>, Failure> {
        let mut guests = Vec::new();
        for name in self.registry.names()? {
            let folder = self.registry.guest(&name)?;
            if let Some(record) = folder.record_if_any()? {
                guests.push((folder, record));
            }
        }
        Ok(guests)
    }

    /// Finishes what dead commands left with guests that nobody works on. What cannot be
    /// finished is a failure once; from then on it is only known of ([`trouble`]), and in
    /// nobody's way.
    pub fn settle_all(&self) -> Result<Settled, Failure> {
        self.qos_ledger().settle();
        let (mut failures, mut busy) = (Vec::new(), Vec::new());
        for name in self.registry.names()? {
            let record = self.registry.guest(&name).and_then(|folder| folder.record());
            if let Err(error @ (RegistryError::Io { .. } | RegistryError::BadName(_))) = record {
                failures.push(error.into());
                continue;
            }
            match self.hold(&name) {
                Ok(held) => drop(held.folder.remove(TROUBLE)),
                Err(failure) if failure.is_attention() => {
                    failures.extend(self.not_told_before(&name, failure));
                }
                // Somebody is at work, or it went just now.
                Err(_) => busy.push(name),
            }
        }
        Ok(Settled { failures, busy })
    }
}

impl Context {
    /// A failure that nobody was told of before; it is noted that somebody is now.
    fn not_told_before(&self, name: &str, failure: Failure) -> Option<Failure> {
        let folder = self.registry.guest(name).ok()?;
        let what = failure.whole();
        if trouble(&folder).as_deref() == Some(what.as_str()) {
            return None;
        }
        // Where it cannot be noted it is told again.
        let _ = folder.write_for_now(TROUBLE, &what);
        Some(failure)
    }
}

/// Says where a store may lose what it has.
pub fn warn_of(store: &Store) {
    if let Some(why) = store.warning() {
        // Nobody may be there to hear it.
        let _ = writeln!(std::io::stderr(), "dewar: {}", printable(&why));
    }
}

/// What could not be finished with a guest when it was last tried.
pub fn trouble(folder: &GuestFolder) -> Option<String> {
    folder.read(TROUBLE).ok().flatten()
}

/// How all guests are after [`Context::settle_all`].
pub struct Settled {
    /// What could not be finished, and which guests cannot be told of.
    pub failures: Vec<Failure>,
    /// Guests that somebody was at work on.
    pub busy: Vec<String>,
}

/// Finishes what a dead command left with a guest; its record may be another
/// then.
fn settle(folder: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    recover(|| Qmp::of(&record), folder, &record)?;
    replace_journal::settle(folder, &folder.record()?)?;
    settle_unthawed(folder, folder.record()?)
}

/// Lets a guest run whose `restore` or `thaw` died just before it would have. Not one whose
/// memory nobody serves: its QEMU may wait for a page of it, and answer nobody. One that QEMU
/// does not let run is told of once: a frozen one stays frozen, another stands as it is.
fn start_if_pending(folder: &GuestFolder, mut record: GuestRecord) -> Result<GuestRecord, Failure> {
    let pending = record.start_pending && record.phase == Phase::Running;
    if !pending || !record.process.is_alive() || lacks_server(folder, &record) {
        return Ok(record);
    }
    let result = Qmp::of(&record).and_then(|mut qmp| start(&mut qmp));
    let refused = match result {
        Ok(()) => None,
        Err(error @ QmpError::Refused { .. }) => Some(error),
        Err(error) => return Err(qmp_failure(&record, &error).attention()),
    };
    record.start_pending = false;
    let is_kept = matches!(&record.frozen, Some(Frozen { kept: Kept::InPlace { .. }, .. }));
    if refused.is_some() && is_kept {
        // It has not run, and all that was kept of it is there.
        kill(&record.process);
        record.phase = Phase::Frozen;
    } else {
        record.frozen = None;
    }
    folder.set_record(&record)?;
    let told = record.clone();
    refused.map_or(Ok(record), |error| {
        let state = if is_kept { "it stays frozen" } else { "it is loaded and stands still" };
        Err(qmp_failure(&told, &error).attention().state(state).advice(CONT))
    })
}

/// Whether a guest's memory has not all arrived and nobody brings it.
pub fn lacks_server(folder: &GuestFolder, record: &GuestRecord) -> bool {
    record.process.is_alive()
        && record.phase == Phase::Running
        && !ServerState::of(folder, record).complete
        && !server_alive(record)
}

/// Takes hold of a guest that runs and has all its memory.
pub fn attach(
    context: &Context,
    name: &str,
    progress: &Progress,
) -> Result<(QemuGuest, GuestFolder, GuestLock), Failure> {
    attach_within(context, name, Duration::ZERO, progress)
}

/// The same, where another command that has it may have so long to let it go.
pub fn attach_within(
    context: &Context,
    name: &str,
    patience: Duration,
    progress: &Progress,
) -> Result<(QemuGuest, GuestFolder, GuestLock), Failure> {
    let held = context.hold_within(name, patience, |_, _| Ok(()))?;
    held.require_alive()?;
    wait_for_memory(&held, progress)?;
    let LockedGuest { folder, record, lock } = held;
    let guest = QemuGuest::attach(folder.clone(), record)
        .map_err(|error| Failure::from(error).state("the guest was not touched"))?;
    Ok((guest, folder, lock))
}

/// Waits until all memory of a restored guest has arrived: before, its process
/// does not have it, and nobody else can.
pub fn wait_for_memory(held: &LockedGuest, progress: &Progress) -> Result<(), Failure> {
    let mut in_trouble = None;
    loop {
        let state = ServerState::of(&held.folder, &held.record);
        if state.complete {
            return Ok(());
        }
        let name = &held.record.name;
        let unfinished = |why: &str| {
            Failure::new(Code::Failed, format!("the memory of '{name}' has not all arrived: {why}"))
                .state("the guest runs on")
        };
        // A store that is away for a moment is none.
        match state.problem {
            None => in_trouble = None,
            Some(problem) if in_trouble.get_or_insert_with(Instant::now).elapsed() > AWAY => {
                return Err(unfinished(&problem));
            }
            Some(_) => {}
        }
        if !server_alive(&held.record) && !ServerState::of(&held.folder, &held.record).complete {
            return Err(unfinished("its page server is gone")
                .advice(format!("'dewar restore {name}' goes on with it")));
        }
        progress.stage("waiting for memory");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Connects to a guest's QEMU.
pub fn connect(record: &GuestRecord) -> Result<Qmp, Failure> {
    Qmp::of(record).map_err(|error| qmp_failure(record, &error))
}

/// Says that a guest's QEMU does not do as it is told.
pub fn qmp_failure(record: &GuestRecord, error: &QmpError) -> Failure {
    Failure::new(Code::Failed, format!("guest '{}': {error}", record.name))
}

/// What to do with a guest that its QEMU does not let run.
const CONT: &str = "mend what QEMU complains of, then 'dewar thaw' it if it is frozen, or let it run \
                    with QMP 'cont'; 'dewar stop --now' ends it";

impl LockedGuest {
    /// Ends all processes of the guest, whatever state it and they are in, and then finishes
    /// without them what a dead command left.
    pub fn end(&mut self) -> Result<(), Failure> {
        for process in handover::processes(&self.folder) {
            kill(&process);
        }
        end(&self.record)?;
        await_server(&self.record);
        self.record = settle(&self.folder, self.folder.record()?)?;
        // A hand-over may have moved it meanwhile.
        end(&self.record)?;
        let _ = self.folder.remove(TROUBLE);
        Ok(())
    }

    /// That its QEMU runs.
    pub fn require_alive(&self) -> Result<(), Failure> {
        if self.record.process.is_alive() {
            return Ok(());
        }
        let name = &self.record.name;
        if self.record.phase == Phase::Frozen {
            return Err(Failure::new(Code::Failed, format!("guest '{name}' is frozen"))
                .advice(format!("'dewar thaw {name}' lets it go on")));
        }
        Err(Failure::new(Code::Failed, format!("guest '{name}' has ended"))
            .advice(format!("'dewar restore {name}' brings back its newest checkpoint")))
    }
}

/// That no guest by this name stands in the way of a new one, whose RAM shall
/// be in `ram_dir`, if it is to have any of ours. A dead one's memory is given back
/// when what is returned is dropped. `thawing` says that the guest is to be thawed
/// from a store.
pub fn clear_predecessor(
    folder: &GuestFolder,
    ram_dir: Option<&Path>,
    thawing: bool,
) -> Result<Vec<File>, Failure> {
    let mut unnamed = Vec::new();
    match folder.record() {
        Err(RegistryError::NoSuchGuest(_)) => {}
        Err(error) => return Err(error.into()),
        // One that was just killed takes a moment: its memory is freed.
        Ok(record)
            if record.process.is_alive()
                && !(record.process.is_ending() && record.process.ends_within(END_WITHIN)) =>
        {
            return Err(RegistryError::Exists(folder.name().to_owned()).into());
        }
        Ok(record) => {
            let record = settle(folder, record)?;
            if record.process.is_alive() {
                return Err(RegistryError::Exists(folder.name().to_owned()).into());
            }
            if record.frozen.is_some() && !thawing {
                let name = &record.name;
                return Err(would_lose(&record).advice(format!(
                    "'dewar thaw {name}' lets it go on; 'dewar stop {name} --yes', or 'dewar restore' \
                     with --yes, gives it up"
                )));
            }
            unnamed = folder.remove_ram(&record)?;
        }
    }
    // A QEMU whose starter died before it could note it.
    if let Ok(mut qmp) = Qmp::connect(&folder.file("qmp.sock")) {
        let _ = qmp.execute("quit", json!({}));
    }
    usual_dirs().into_iter().chain(ram_dir).try_for_each(|it| folder.sweep_ram(it))?;
    Ok(unnamed)
}
