//! `thaw`: a frozen guest goes on.

use crate::args::{ClockChoice, RestoreArgs, StoreArgs, ThawArgs};
use crate::clock::{Clock, bring_forward};
use crate::context::{Context, LockedGuest};
use crate::failure::{Code, Failure};
use crate::frozen_state::{
    all_forwarded, check_memory, listed, read_state, settle_unthawed, unloadable,
};
use crate::output::milliseconds;
use crate::progress::Progress;
use crate::ram_dir::OWN;
use crate::tracking::{self, Tracking};
use crate::verbs::fan_out::Each;
use crate::verbs::restore;
use dewar_guest_qemu::freeze::{forward_again, start};
use dewar_guest_qemu::launch::kill;
use dewar_guest_qemu::start_from_state::{load_state, start as let_run};
use dewar_guest_qemu::{
    END_WITHIN, Qmp, QmpError, RunState, close_userfaultfd_device, map_ram_files,
    userfaultfd_origin,
};
use dewar_memory::{Pid, ProcessHandle};
use dewar_registry::{Frozen, GuestFolder, GuestRecord, Kept, KeptDisk, Phase};
use dewar_units::PAGE_BYTES;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

pub fn run(context: &Context, args: ThawArgs) -> Result<(), Failure> {
    let Some(name) = &args.which.name else {
        let frozen = |record: &GuestRecord| is_frozen(record).is_some();
        let end = |_: &Value| "goes on".to_owned();
        let verb = Each { verb: "thaw", doing: "thawing", done: "thawed", end: &end };
        let clock = if args.clock == ClockChoice::Keep { "--clock=keep" } else { "--clock=step" };
        return verb.of(context, frozen, args.which.jobs(2), &[clock.into()]);
    };
    let began = Instant::now();
    let progress = Progress::new("looking at the guest");
    let LockedGuest { folder, record, lock } = context.hold(name)?;
    let Some(frozen) = is_frozen(&record).cloned() else {
        return Err(Failure::new(Code::Failed, format!("guest '{name}' is not frozen")));
    };
    let was_running = frozen.was_running;
    let (state, sum, sums, disks) = match frozen.kept.clone() {
        Kept::InPlace { state, sum, sums, disks } => (state, sum, sums, disks),
        Kept::InStore { store, image } => {
            drop((progress, lock));
            // Ours may have to be mounted again.
            let folder = record.ram.first().and_then(|file| file.path.parent());
            let folder = folder.filter(|it| *it != Path::new(OWN)).map(Path::to_owned);
            return from_store(context, name, store, image, (!was_running, args.clock), folder);
        }
    };
    let stays = |failure: Failure| failure.state("the guest stays frozen");
    if !args.force {
        check_disks(name, &disks).map_err(stays)?;
    }
    let bytes = read_state(&state, &sum).map_err(stays)?;
    let saved = fs::metadata(&state).and_then(|data| data.modified()).unwrap_or(SystemTime::now());
    if sums {
        progress.stage("checking memory");
        check_memory(&folder, &record).map_err(stays)?;
    }
    progress.stage("starting QEMU");
    let Revived { record, mut qmp, unforwarded } =
        revive(&folder, record, &frozen, bytes, &progress)
            .map_err(|failure| stays(failure).advice(format!("'dewar thaw {name}' tries again")))?;
    let record = go_on(&folder, record, &mut qmp, &progress)?;
    // One that had powered off, say, is as it was.
    let now = RunState::of(&mut qmp).unwrap_or_else(|_| RunState::named("running"));
    folder.remove_kept(&record.ram);
    drop(progress);
    let ms = began.elapsed().as_secs_f64() * 1e3;
    let clock = now
        .is_running()
        .then(|| bring_forward(args.clock, saved, &record.arguments, &record.folder));
    let how = match now.why_not_running() {
        Some(_) => format!("is {now}, as it was,"),
        None if was_running => "runs".to_owned(),
        None => "is paused".to_owned(),
    };
    context.print_with(
        json!({
            "name": name, "pid": record.process.pid, "paused": !was_running,
            "state": now.to_string(), "total_ms": ms,
            "not_forwarded": unforwarded, "clock": clock.as_ref().map(Clock::told),
        }),
        &format!(
            "{name} {how} as process {} after {}{}{}",
            record.process.pid,
            milliseconds(ms),
            listed(&unforwarded),
            clock.as_ref().map_or_else(String::new, Clock::line)
        ),
        all_forwarded(name, &unforwarded).and_then(|()| match now.why_not_running() {
            Some(why) if was_running => {
                let what = format!("'{name}' was thawed, and {why}");
                Err(Failure::new(Code::Attention, what).advice(now.advice().unwrap_or_default()))
            }
            _ => Ok(()),
        }),
    )
}

/// Where a guest is that can be thawed.
fn is_frozen(record: &GuestRecord) -> Option<&Frozen> {
    record.frozen.as_ref().filter(|_| record.phase != Phase::Running)
}

/// The guest remembers its disks as they were: its file cache, a journal half written.
fn check_disks(name: &str, disks: &[KeptDisk]) -> Result<(), Failure> {
    let Some(disk) = disks.iter().find(|disk| !disk.is_as_it_was()) else { return Ok(()) };
    let what = format!("disk {} was written while '{name}' was frozen", disk.path.display());
    Err(Failure::new(Code::Failed, what).advice(format!(
        "'dewar thaw {name} --force' goes on with it as it is: what the guest has in memory of \
         its file system may then destroy that"
    )))
}

fn from_store(
    context: &Context,
    name: &str,
    store: String,
    image: String,
    (paused, clock): (bool, ClockChoice),
    ram_dir: Option<PathBuf>,
) -> Result<(), Failure> {
    let args = RestoreArgs {
        reference: image,
        name: Some(name.to_owned()),
        new_identity: false,
        eager: false,
        paused,
        run: false,
        clock,
        replace: false,
        // Its memory was promised to it before.
        overcommit: false,
        ram_dir,
        store: StoreArgs { store: Some(store) },
    };
    restore::thaw(context, args)
}

/// A guest that has its state again.
struct Revived {
    record: GuestRecord,
    qmp: Qmp,
    /// What was said against ports that it forwarded.
    unforwarded: Vec<String>,
}

fn revive(
    folder: &GuestFolder,
    mut record: GuestRecord,
    frozen: &Frozen,
    state: Vec<u8>,
    progress: &Progress,
) -> Result<Revived, Failure> {
    let before = record.clone();
    let was_running = frozen.was_running;
    let tracking = Tracking::load(folder, &record)?.filter(|it| it.since.is_some());
    let launched = start(folder, &record, &frozen.machine)?;
    let mut qmp = launched.qmp;
    progress.stage("started");
    record.process = launched.process;
    record.adopted = false;
    record.qmp = folder.file("qmp.sock");
    // Its taps and sockets are opened anew, by other numbers.
    record.descriptors.clear();
    record.not_handed_over.clear();
    // Where it cannot be tracked the next checkpoint compares.
    let tracker = tracking.as_ref().and_then(|_| track(&mut qmp, &record));
    let mut unforwarded = Vec::new();
    let loaded =
        load_state(&mut qmp, state).map_err(|error| unloadable(folder, &error)).and_then(|()| {
            progress.stage("loaded");
            if let Some(ports) = &frozen.forwards {
                unforwarded = forward_again(&mut qmp, ports);
            }
            record.phase = Phase::Running;
            record.start_pending = was_running;
            // Of one that is to run until it does: its QEMU may die before.
            record.frozen = record.frozen.take().filter(|_| was_running);
            Ok(folder.set_record(&record)?)
        });
    if let Err(failure) = loaded {
        // It never ran; the next try would end it too.
        kill(&record.process);
        // The disk may say otherwise, though writing that failed.
        let _ = folder.set_record(&before);
        return Err(failure);
    }
    if let Some((tracking, tracker)) = tracking.zip(tracker) {
        let pages = record.ram.iter().map(|file| file.bytes).sum::<u64>() / PAGE_BYTES as u64;
        let written = tracking.pages_before(pages);
        let _ = tracking.continued(record.process, tracker, &written).save(folder);
    }
    progress.signal_at("thawed");
    Ok(Revived { record, qmp, unforwarded })
}

/// Lets a guest run that is loaded, and on record as such.
fn go_on(
    folder: &GuestFolder,
    mut record: GuestRecord,
    qmp: &mut Qmp,
    progress: &Progress,
) -> Result<GuestRecord, Failure> {
    if !record.start_pending {
        return Ok(record);
    }
    if let Err(error) = let_run(qmp) {
        if let QmpError::Refused { .. } = error {
            // It has not run, and all that was kept of it is there.
            kill(&record.process);
            record.phase = Phase::Frozen;
            record.start_pending = false;
            folder.set_record(&record)?;
            return Err(Failure::new(Code::Failed, format!("starting the guest: {error}"))
                .state("the guest stays frozen")
                .advice(format!("'dewar thaw {}' tries again", record.name)));
        }
        return Err(not_started(folder, record, &error));
    }
    progress.signal_at("let run");
    record.start_pending = false;
    record.frozen = None;
    // It runs; where this cannot be written, the next command sees that and notes it.
    let _ = folder.set_record(&record);
    Ok(record)
}

/// Why a loaded guest does not run, and how it is.
fn not_started(folder: &GuestFolder, record: GuestRecord, error: &QmpError) -> Failure {
    let failed = Failure::new(Code::Failed, format!("starting the guest: {error}"));
    let name = record.name.clone();
    // A QEMU that is ending closes its socket before it is gone.
    let ended = record.process.ends_within(END_WITHIN);
    match settle_unthawed(folder, record) {
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

fn track(qmp: &mut Qmp, record: &GuestRecord) -> Option<u64> {
    let process = ProcessHandle::open(Pid(record.process.pid)).ok()?;
    let ram = map_ram_files(&record.name, record.process.pid, &record.ram).ok()?;
    let origin = userfaultfd_origin(qmp, &process).ok()?;
    let tracker = tracking::arm(&process, &ram, origin);
    close_userfaultfd_device(qmp);
    tracker.ok()
}
