//! `thaw`: a frozen guest goes on.

use crate::clock::{Clock, bring_forward};
use crate::failure::{Code, Failure};
use crate::frozen_state::{check_memory, read_state, unloadable};
use crate::held_ram;
use crate::locked_guest::LockedGuest;
use crate::recovery::recover_unthawed;
use crate::reporter::Reporter;
use crate::served_disks;
use crate::tracking::{self, Tracking};
use dewar_guest_qemu::freeze::start;
use dewar_guest_qemu::launch::kill;
use dewar_guest_qemu::{END_WITHIN, Incoming, IncomingError, QmpError, RunState};
use dewar_registry::{Frozen, GuestFolder, GuestRecord, Kept, KeptDisk, Phase};
use dewar_units::PAGE_BYTES;
use std::fs;
use std::time::{Instant, SystemTime};

/// A guest that goes on.
#[derive(Debug)]
pub struct Thawed {
    /// Its record.
    pub record: GuestRecord,
    /// Whether it ran before it was frozen.
    pub was_running: bool,
    /// How it stands.
    pub state: RunState,
    /// What QEMU said against ports that it forwarded.
    pub unforwarded: Vec<String>,
    /// Its clock, if it runs.
    pub clock: Option<Clock>,
    /// When it was back.
    pub back_at: Instant,
}

/// How a guest shall be thawed.
#[derive(Debug, Clone, Copy)]
pub struct ThawOptions {
    /// Also where a disk was written while it was frozen.
    pub force: bool,
    /// Whether its clock goes on from when it was frozen.
    pub keep_clock: bool,
}

/// Where a guest is that can be thawed.
pub fn is_frozen(record: &GuestRecord) -> Option<&Frozen> {
    record.frozen.as_ref().filter(|_| matches!(record.phase, Phase::Frozen | Phase::Restoring))
}

/// The guest remembers its disks as they were: its file cache, a journal half written.
fn check_disks(name: &str, disks: &[KeptDisk]) -> Result<(), Failure> {
    let Some(disk) = disks.iter().find(|disk| !disk.is_as_it_was()) else { return Ok(()) };
    if !disk.path.exists() {
        let what = format!("disk {} of '{name}' is not there", disk.path.display());
        let advice = format!("'dewar thaw {name}' lets it go on when it is");
        return Err(Failure::new(Code::Failed, what).advice(advice));
    }
    let what = format!("disk {} was written while '{name}' was frozen", disk.path.display());
    Err(Failure::new(Code::Failed, what).advice(format!(
        "'dewar thaw {name} --force' goes on with it as it is: what the guest has in memory of \
         its file system may then destroy that"
    )))
}

/// Thaws a guest that is frozen where it was.
///
/// # Errors
/// Where it does not go on; the failure says how it is.
pub fn thaw_in_place(
    guest: LockedGuest,
    frozen: &Frozen,
    options: ThawOptions,
    reporter: &dyn Reporter,
) -> Result<Thawed, Failure> {
    let LockedGuest { folder, record, lock: _lock } = guest;
    let name = record.name.clone();
    let stays = |failure: Failure| failure.state("the guest stays frozen");
    let Kept::InPlace { state, sum, sums, disks } = &frozen.kept else {
        let what = format!("guest '{name}' is kept in a store");
        return Err(stays(Failure::new(Code::Failed, what)));
    };
    if !options.force {
        check_disks(&name, disks).map_err(stays)?;
    }
    let bytes = read_state(state, sum).map_err(stays)?;
    let saved = fs::metadata(state).and_then(|data| data.modified()).unwrap_or(SystemTime::now());
    if *sums {
        reporter.stage("checking memory");
        check_memory(&folder, &record).map_err(stays)?;
    }
    reporter.stage("starting QEMU");
    let again = |failure| stays(failure).advice(format!("'dewar thaw {name}' tries again"));
    let (mut guest, unforwarded) = load(&folder, record, frozen, bytes, reporter).map_err(again)?;
    reporter.reached("thawed");
    if let Err(error) = guest.let_run(&|step| reporter.reached(step)) {
        return Err(not_started(&folder, guest.record().clone(), error));
    }
    let back_at = Instant::now();
    // A guest that had powered off, say, is as it was.
    let state = RunState::of(guest.qmp()).unwrap_or_else(|_| RunState::named("running"));
    let record = guest.record().clone();
    folder.remove_kept(&record.ram);
    // Memory without a name is this QEMU's from here on.
    held_ram::follow(&record);
    let set_clock = || bring_forward(options.keep_clock, saved, &record.arguments, &record.folder);
    let clock = state.is_running().then(set_clock);
    Ok(Thawed { was_running: frozen.was_running, state, unforwarded, clock, back_at, record })
}

/// Starts a QEMU on the guest's RAM and loads the guest into it: it is on record as running then,
/// and stands still. Returns what QEMU said against ports that it forwarded, too.
fn load(
    folder: &GuestFolder,
    record: GuestRecord,
    frozen: &Frozen,
    state: Vec<u8>,
    reporter: &dyn Reporter,
) -> Result<(Incoming, Vec<String>), Failure> {
    let before = record.clone();
    let tracking = Tracking::load(folder, &record)?.filter(|it| it.since.is_some());
    served_disks::serve_record(folder, &record)?;
    let launched = start(folder, &record, &frozen.machine)?;
    reporter.stage("started");
    let mut record = GuestRecord {
        process: launched.process,
        adopted: false,
        qmp: folder.file("qmp.sock"),
        start_pending: frozen.was_running,
        ..record
    };
    // Its taps and sockets are opened anew, by other numbers.
    record.descriptors.clear();
    record.not_handed_over.clear();
    let mut guest = Incoming::new(folder.clone(), record, launched.qmp);
    // Where it cannot be tracked the next checkpoint compares.
    let tracker = tracking.as_ref().and_then(|_| track(&mut guest));
    let load = || -> Result<Vec<String>, Failure> {
        guest.load(state).map_err(|error| unloadable(folder, &error))?;
        reporter.stage("loaded");
        Ok(guest.commit()?.unforwarded)
    };
    match load() {
        Ok(unforwarded) => {
            if let Some((tracking, tracker)) = tracking.zip(tracker) {
                let bytes = guest.record().ram.iter().map(|file| file.bytes).sum::<u64>();
                let written = tracking.pages_before(bytes / PAGE_BYTES as u64);
                let process = guest.record().process;
                let _ = tracking.continued(process, tracker, &written).save(folder);
            }
            Ok((guest, unforwarded))
        }
        Err(failure) => {
            // It never ran; the next try would end it too.
            kill(&guest.record().process);
            // The disk may say otherwise, though writing that failed.
            let _ = folder.set_record(&before);
            Err(failure)
        }
    }
}

fn track(guest: &mut Incoming) -> Option<u64> {
    let (process, ram, origin) = guest.memory().ok()?;
    let tracker = tracking::arm(&process, &ram, origin);
    guest.close_uffd_device();
    tracker.ok()
}

/// Why a loaded guest does not run, and how it is.
fn not_started(folder: &GuestFolder, record: GuestRecord, error: IncomingError) -> Failure {
    let refused = matches!(error, IncomingError::NotStarted(QmpError::Refused { .. }));
    let failed = Failure::from(error);
    let name = record.name.clone();
    if refused {
        return failed
            .state("the guest stays frozen")
            .advice(format!("'dewar thaw {name}' tries again"));
    }
    // A QEMU that is ending closes its socket before it is gone.
    let ended = record.process.ends_within(END_WITHIN);
    match recover_unthawed(folder, record) {
        Err(failure) => failure,
        Ok(record) if record.phase == Phase::Frozen => failed
            .state("its new QEMU ended; the guest stays frozen")
            .advice(format!("'dewar thaw {name}' tries again")),
        Ok(_) if ended => failed
            .attention()
            .state("its new QEMU ended, and the guest may have run in it")
            .advice(format!("'dewar restore {name}' brings back its newest checkpoint")),
        Ok(_) => failed
            .attention()
            .state("the guest is loaded but was not let run")
            .advice("the next dewar command that looks at it tries again"),
    }
}
