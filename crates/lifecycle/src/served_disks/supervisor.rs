//! The process that stands beside a guest whose disks are served: it holds the guest at a reset for as long as it takes to
//! exchange its memory, and sees to it that there is a server.
//!
//! ```text
//!  running ---- QEMU says SHUTDOWN ----> stopped to reset ---- memory exchanged, reset, cont ----> running
//!                                        stopped to end   ---- quit
//! ```
//!
//! What QEMU said is remembered over a lost connection. Before it is told to reset a guest a file says so: a supervisor
//! that finds the guest in state "prelaunch" and that file lets it run, and in no other case.

use super::disks::{READY_WITHIN, SUPERVISOR, ServedDisks};
use super::server::Aside;
use super::server_watch::ServerWatch;
use super::state::LastReset;
use crate::failure::{Code, Failure};
use crate::helper::Parent;
use crate::host::Host;
use crate::page_server::ServerState;
use crate::reporter::Reporter;
use dewar_guest_qemu::QmpError;
use dewar_guest_qemu::cmdline::{RESET_MONITOR_FILE, own_reset_option};
use dewar_guest_qemu::handover::is_under_way as is_handed_over;
use dewar_guest_qemu::reset::{MemoryAside, ResetMonitor, Stopped, settle};
use dewar_registry::{GuestFolder, GuestLock, GuestRecord, Phase, ProcessId};
use dewar_units::PAGE_BYTES;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LOCK: &str = "disk-supervisor.lock";
/// The QEMU that was told to reset its guest, and is then to let it run.
const RESETTING: &str = "resetting.json";
/// The QEMU that was told to stop at resets.
const HOLDING: &str = "holds-resets.json";
/// How often it is looked whether something has changed.
const TICK: Duration = Duration::from_millis(200);
/// How long a guest's own firmware may reset it once more after a reset.
const FIRMWARE: Duration = Duration::from_secs(3);
/// How long a command that has the guest may keep it held at a reset.
const COMMANDS: Duration = Duration::from_secs(5);
/// The guest takes new memory while what it had is searched and given back. It gets none where there is not as much room
/// as it had, or this.
const MOST_ROOM: u64 = 1 << 30;

/// The supervisor's own life.
///
/// # Errors
/// Where the disks cannot be served; the command that waits is told.
pub fn supervise(host: &Host, name: &str, reporter: &dyn Reporter) -> Result<(), Failure> {
    let folder = host.registry.guest(name)?;
    let mut parent = Parent::of_this_process()
        .map_err(|error| Failure::new(Code::Failed, format!("disk supervisor: {error}")))?;
    let begun = alone(&folder).and_then(|lock| Ok((lock, ServerWatch::start(&folder)?)));
    let (_lock, server) = match begun {
        Ok(begun) => begun,
        Err(failure) => {
            parent.fail(&failure.whole());
            return Err(failure);
        }
    };
    let _ = parent.ready();
    drop(parent);
    let folder = &folder;
    let mut supervisor = Supervisor { host, folder, server, reporter, stopped: None };
    let mut has_had_one = false;
    while let Some(record) = supervisor.next_guest(has_had_one)? {
        supervisor.stand_beside(&record);
        has_had_one = true;
    }
    supervisor.server.end();
    Ok(())
}

/// That there is no other supervisor of the guest.
fn alone(folder: &GuestFolder) -> Result<File, Failure> {
    let failed = |error: std::io::Error| Failure::new(Code::Failed, format!("{LOCK}: {error}"));
    let file = File::create(folder.file(LOCK)).map_err(failed)?;
    let deadline = Instant::now() + READY_WITHIN / 6;
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() > deadline {
            return Err(Failure::new(Code::Failed, "another process serves them"));
        }
        std::thread::sleep(TICK);
    }
    folder.write_for_now(SUPERVISOR, &ProcessId::of(std::process::id() as i32))?;
    Ok(file)
}

struct Supervisor<'h> {
    host: &'h Host,
    folder: &'h GuestFolder,
    server: Arc<ServerWatch>,
    reporter: &'h dyn Reporter,
    /// Why the guest stands still, where nothing was done about it yet.
    stopped: Option<Stopped>,
}

impl Supervisor<'_> {
    /// The guest as it runs now; nothing where it has ended, or where no command is about to start it.
    fn next_guest(&mut self, has_had_one: bool) -> Result<Option<GuestRecord>, Failure> {
        // A guest that was removed meanwhile has none, and its folder is not to be made again by a lock.
        while ServedDisks::of(self.folder)?.is_some() {
            let record = self.folder.record_if_any()?;
            if let Some(record) = record.filter(|record| record.process.is_alive()) {
                return Ok(Some(record));
            }
            // A command with the lock may be about to give it a QEMU; any other wants the disks for itself, or starts a
            // supervisor of its own.
            let lock = self.folder.try_lock();
            let is_awaited = lock.is_err() && (!has_had_one || is_handed_over(self.folder));
            let record = self.folder.record_if_any()?;
            if !is_awaited && !record.is_some_and(|record| record.process.is_alive()) {
                if lock.is_ok() {
                    // The next one with the lock starts another supervisor, if need be.
                    self.folder.remove(SUPERVISOR)?;
                }
                return Ok(None);
            }
            drop(lock);
            std::thread::sleep(TICK / 4);
        }
        Ok(None)
    }

    /// Beside one QEMU, until it ends.
    fn stand_beside(&mut self, record: &GuestRecord) {
        self.stopped = None;
        while record.process.is_alive() {
            let socket = self.folder.file(RESET_MONITOR_FILE);
            // Where it is lost it is connected to again; a QEMU that was just started may not listen yet.
            if let Ok(mut monitor) = ResetMonitor::connect(&socket, &record.process) {
                let _ = self.watch(&mut monitor, record);
            }
            std::thread::sleep(TICK / 10);
        }
        if ServedDisks::of(self.folder).is_ok_and(|disks| disks.is_some()) {
            let _ = self.folder.lock().map(|_lock| settle(record));
        }
    }

    fn watch(&mut self, monitor: &mut ResetMonitor, record: &GuestRecord) -> Result<(), QmpError> {
        let disks = ServedDisks::of(self.folder).ok().flatten();
        let is_warm = disks.is_some_and(|disks| disks.is_any_warm());
        // A command line that says what a reset is to do is obeyed.
        if own_reset_option(&record.arguments).is_some() {
            loop {
                monitor.stopped_within(TICK)?;
            }
        }
        self.take_up(monitor, record)?;
        // By a supervisor before this one, when its cache was to be kept.
        if !is_warm && self.is_noted(HOLDING, record) {
            monitor.hold_none()?;
            let _ = self.folder.remove(HOLDING);
        }
        let mut holds_from = is_warm.then(Instant::now);
        loop {
            if holds_from.is_some_and(|from| Instant::now() >= from) {
                let _ = self.folder.write_for_now(HOLDING, &record.process);
                monitor.hold_next()?;
                holds_from = None;
            }
            self.stopped = monitor.stopped_within(TICK)?.or(self.stopped);
            if let Some(stopped) = self.stopped {
                if self.handle(stopped, monitor, record)? && is_warm {
                    holds_from = Some(Instant::now() + FIRMWARE);
                }
                self.stopped = None;
            }
        }
    }

    /// Goes on with what the supervisor before this one had begun, if it died in it.
    fn take_up(
        &mut self,
        monitor: &mut ResetMonitor,
        record: &GuestRecord,
    ) -> Result<(), QmpError> {
        let state = monitor.state()?;
        match state.word() {
            "prelaunch" if self.is_noted(RESETTING, record) => {
                monitor.let_run()?;
                let _ = self.folder.remove(RESETTING);
            }
            // Why it stands still is not known where that supervisor died first. Where it had powered off it boots
            // again: the other mistake, to end one that was to go on, would be the worse one.
            "shutdown" => self.stopped = self.stopped.or(Some(Stopped::Reset)),
            "guest-panicked" => self.stopped = Some(Stopped::Off),
            _ => {}
        }
        Ok(())
    }

    /// Does what QEMU was about to do; says whether it reset the guest.
    fn handle(
        &mut self,
        stopped: Stopped,
        monitor: &mut ResetMonitor,
        record: &GuestRecord,
    ) -> Result<bool, QmpError> {
        let state = monitor.state()?;
        if state.is_running() || monitor.is_migrating()? {
            // Somebody went on with it.
            return Ok(false);
        }
        match stopped {
            Stopped::Off => monitor.quit().map(|()| false),
            Stopped::Reset if state.is_off() => self.reset(monitor, record).map(|()| true),
            Stopped::Reset => {
                // It stood still before, and stays so.
                monitor.reset()?;
                Ok(true)
            }
        }
    }

    /// Resets a guest that is held, with its memory set aside where that can be.
    fn reset(&mut self, monitor: &mut ResetMonitor, record: &GuestRecord) -> Result<(), QmpError> {
        let began = Instant::now();
        // What a supervisor before this one had reached was told to tests by that one.
        let is_first = !self.is_noted(RESETTING, record);
        let reporter = self.reporter;
        let reached = |step: &str| {
            if is_first {
                reporter.reached(step);
            }
        };
        let _ = self.folder.write_for_now(RESETTING, &record.process);
        reached("held");
        // A command that works on the guest has its memory in hand.
        let lock = self.folder.lock_within(COMMANDS).ok();
        // Nor is it reset under a command that has it stand still, or has moved it elsewhere, meanwhile.
        if !monitor.state()?.is_off() || monitor.is_migrating()? {
            let _ = self.folder.remove(RESETTING);
            return Ok(());
        }
        let aside = self.set_aside(lock.as_ref(), monitor, &record.process, &reached);
        reached("exchanged");
        // The rest is QEMU's own work at any reset.
        let held_ms = began.elapsed().as_secs_f64() * 1e3;
        monitor.reset()?;
        reached("reset");
        monitor.let_run()?;
        let _ = self.folder.remove(RESETTING);
        drop(lock);
        let held = LastReset::of(self.folder).map_or(0, |last| last.held) + 1;
        let copied = aside.as_ref().ok().and_then(|(aside, _)| aside.copied.as_ref());
        let copied = copied.map(ToString::to_string);
        let cold = aside.as_ref().err().cloned();
        LastReset { held, held_ms, cold, copied }.save(self.folder);
        if let Ok((MemoryAside { files, .. }, most_pages)) = aside {
            let aside = Aside { files: files.len(), most_pages, reset: held };
            self.server.hand_over(&files, &aside);
        }
        Ok(())
    }

    /// Whether a file of the guest's folder names its QEMU.
    fn is_noted(&self, file: &str, record: &GuestRecord) -> bool {
        let noted = self.folder.read::<ProcessId>(file).ok().flatten();
        noted.is_some_and(|noted| noted.is_same(&record.process))
    }

    /// Exchanges the guest's memory. Returns what it had, and how much of that may be kept.
    fn set_aside(
        &self,
        lock: Option<&GuestLock>,
        monitor: &mut ResetMonitor,
        process: &ProcessId,
        reached: &dyn Fn(&str),
    ) -> Result<(MemoryAside, u64), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        if lock.is_none() {
            return Err("a command was at work on the guest".to_owned());
        }
        // As it is now: a command may have changed it.
        let record = self.folder.record().map_err(|error| text(&error))?;
        if !record.process.is_same(process) {
            return Err("another QEMU has the guest".to_owned());
        }
        settle(&record).map_err(|error| text(&error))?;
        let has_all = ServerState::of(self.folder, &record).complete;
        if record.phase != Phase::Running || record.migration.is_some() || !has_all {
            return Err("its memory had not all arrived".to_owned());
        }
        let room = self.room(&record)?;
        // Its writes are tracked in the memory that goes: the next checkpoint compares.
        crate::tracking::forget(self.folder).map_err(|failure| failure.whole())?;
        let aside = monitor.set_memory_aside(&record, room.for_a_copy, reached);
        Ok((aside.map_err(|error| text(&error))?, room.most_pages))
    }

    /// What there is room for beside all memory that was promised.
    fn room(&self, record: &GuestRecord) -> Result<Room, String> {
        let disks = ServedDisks::of(self.folder).ok().flatten().ok_or("it has no such disks")?;
        let wanted = |bytes: Option<u64>| bytes.unwrap_or(disks.memory_bytes);
        let warm = disks.disks.iter().filter(|disk| disk.is_warm);
        let wanted: u64 = warm.map(|disk| wanted(disk.cache_bytes)).sum();
        let beside = record.ram.first().and_then(|ram| ram.path.parent()).unwrap_or(Path::new("/"));
        let room = self.host.ram_room(&record.name, beside, false).map_err(|it| it.to_string())?;
        let blocks = |path: &Path| std::fs::metadata(path).map_or(0, |data| data.blocks() * 512);
        let used: u64 = record.ram.iter().map(|ram| blocks(&ram.path)).sum();
        if room.left() < used.min(MOST_ROOM) {
            return Err("the host has not enough memory beside it".to_owned());
        }
        // What it has now becomes free again, but for what is kept.
        let most_pages = wanted.min(room.left()) / PAGE_BYTES as u64;
        Ok(Room { most_pages, for_a_copy: room.left() > used })
    }
}

/// What there is room for when a guest is reset.
struct Room {
    /// Pages that may be kept.
    most_pages: u64,
    /// Whether all of its memory may be copied.
    for_a_copy: bool,
}
