//! `thaw`: a frozen guest goes on.

use crate::args::{RestoreArgs, StoreArgs, ThawArgs};
use crate::context::{Context, Held};
use crate::failure::{Code, Failure};
use crate::output::milliseconds;
use crate::progress::Progress;
use crate::tracking::{self, Tracking};
use crate::verbs::each::Each;
use crate::verbs::freeze::sums_of;
use crate::verbs::restore;
use dewar_guest_qemu::freeze::{SUMS, remove_kept, start};
use dewar_guest_qemu::registry::{Frozen, GuestFolder, GuestRecord, Kept, Phase};
use dewar_guest_qemu::revive::{load_state, start as let_run};
use dewar_guest_qemu::{Qmp, map_ram_files, userfaultfd_origin};
use dewar_memory::{Pid, ProcessHandle, SUM_BYTES, sum};
use dewar_units::PAGE_BYTES;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub fn run(context: &Context, args: ThawArgs) -> Result<(), Failure> {
    let Some(name) = &args.which.name else {
        let frozen = |record: &GuestRecord| record.frozen.is_some();
        let end = |_: &Value| "goes on".to_owned();
        let verb = Each { verb: "thaw", doing: "thawing", done: "thawed", end: &end };
        return verb.of(context, frozen, args.which.jobs(2), &[]);
    };
    let began = Instant::now();
    let progress = Progress::new("looking at the guest");
    let Held { folder, record, lock } = context.hold(name)?;
    let Some(frozen) = record.frozen.clone().filter(|_| record.phase != Phase::Running) else {
        return Err(Failure::new(Code::Failed, format!("guest '{name}' is not frozen")));
    };
    let Frozen { was_running, machine, kept } = frozen;
    let (state, sum, sums) = match kept {
        Kept::InPlace { state, sum, sums } => (state, sum, sums),
        Kept::InStore { store, image } => {
            drop((progress, lock));
            let folder = record.ram.first().and_then(|file| file.path.parent());
            let folder = folder.unwrap_or(Path::new("/dev/shm")).to_owned();
            return from_store(context, name, store, image, !was_running, folder);
        }
    };
    let stays = |failure: Failure| failure.state("the guest stays frozen");
    let bytes = read_state(&state, &sum).map_err(stays)?;
    if sums {
        progress.stage("checking memory");
        check_memory(&folder, &record).map_err(stays)?;
    }
    progress.stage("starting QEMU");
    let (record, mut qmp) = revive(&folder, record, &machine, bytes, was_running, &progress)
        .map_err(|failure| stays(failure).advice(format!("'dewar thaw {name}' tries again")))?;
    let record = go_on(&folder, record, &mut qmp)?;
    remove_kept(&folder, &record.ram);
    drop(progress);
    let ms = began.elapsed().as_secs_f64() * 1e3;
    let how = if was_running { "runs" } else { "is paused" };
    context.print(
        json!({"name": name, "pid": record.process.pid, "paused": !was_running, "total_ms": ms}),
        &format!("{name} {how} as process {} after {}", record.process.pid, milliseconds(ms)),
    );
    Ok(())
}

fn from_store(
    context: &Context,
    name: &str,
    store: String,
    image: String,
    paused: bool,
    ram_dir: PathBuf,
) -> Result<(), Failure> {
    let args = RestoreArgs {
        reference: image,
        name: Some(name.to_owned()),
        eager: false,
        paused,
        ram_dir,
        store: StoreArgs { store: Some(store) },
    };
    restore::thaw(context, args)
}

fn read_state(path: &Path, expected: &str) -> Result<Vec<u8>, Failure> {
    let bytes = fs::read(path).map_err(|error| {
        let what = format!("the state of its devices, {}: {error}", path.display());
        Failure::new(Code::Failed, what)
            .advice("if the machine was restarted its memory is lost: restore a checkpoint")
    })?;
    if format!("{:032x}", sum(&bytes)) == expected {
        return Ok(bytes);
    }
    let what = format!("the state of its devices, {}, was changed", path.display());
    Err(Failure::new(Code::Failed, what))
}

/// That each byte of the guest's memory is what it was.
fn check_memory(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    let changed = |what: String| {
        Failure::new(Code::Failed, format!("the memory of '{}' {what}", record.name))
            .advice("'dewar restore' brings back a checkpoint of it")
    };
    let before: Vec<Vec<String>> =
        folder.read(SUMS)?.ok_or_else(|| changed("has lost its checksums".to_owned()))?;
    let now = sums_of(&record.ram)?;
    for ((file, before), now) in record.ram.iter().zip(&before).zip(&now) {
        let differs = before.iter().zip(now).position(|(before, now)| before != now);
        let differs = differs.or((before.len() != now.len()).then_some(0));
        if let Some(index) = differs {
            let start = index as u64 * SUM_BYTES;
            let end = file.bytes.min(start + SUM_BYTES);
            return Err(changed(format!(
                "was changed while it was frozen: RAM '{}', bytes {start:#x} to {end:#x}",
                file.id
            )));
        }
    }
    if before.len() == record.ram.len() { Ok(()) } else { Err(changed("is incomplete".to_owned())) }
}

fn revive(
    folder: &GuestFolder,
    mut record: GuestRecord,
    machine: &str,
    state: Vec<u8>,
    was_running: bool,
    progress: &Progress,
) -> Result<(GuestRecord, Qmp), Failure> {
    let tracking = Tracking::load(folder, &record)?.filter(|it| it.since.is_some());
    let launched = start(folder, &record, machine)?;
    let mut qmp = launched.qmp;
    progress.stage("started");
    record.process = launched.process;
    record.qmp = folder.file("qmp.sock");
    // Where it cannot be tracked the next checkpoint compares.
    let tracker = tracking.as_ref().and_then(|_| track(&mut qmp, &record));
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        Failure::new(Code::Failed, format!("{what}: {error}"))
    };
    let loaded = load_state(&mut qmp, state)
        .map_err(|error| failed("loading the device state", &error))
        .and_then(|()| {
            progress.stage("loaded");
            record.phase = Phase::Running;
            record.start_pending = was_running;
            record.frozen = None;
            Ok(folder.set_record(&record)?)
        });
    if let Err(failure) = loaded {
        // It never ran; the next try would end it too.
        let _ = ProcessHandle::open(Pid(record.process.pid)).map(|process| process.kill());
        return Err(failure);
    }
    if let Some((tracking, tracker)) = tracking.zip(tracker) {
        let pages = record.ram.iter().map(|file| file.bytes).sum::<u64>() / PAGE_BYTES as u64;
        let before = tracking.pages_before(pages);
        let _ = tracking.continued(record.process, tracker, &before).save(folder);
    }
    progress.signal_at("thawed");
    Ok((record, qmp))
}

/// Lets a guest run that is loaded, and on record as such.
fn go_on(
    folder: &GuestFolder,
    mut record: GuestRecord,
    qmp: &mut Qmp,
) -> Result<GuestRecord, Failure> {
    if !record.start_pending {
        return Ok(record);
    }
    let_run(qmp).map_err(|error| {
        Failure::new(Code::Failed, format!("starting the guest: {error}"))
            .attention()
            .state("the guest is loaded but was not let run")
            .advice("the next dewar command that looks at it tries again")
    })?;
    record.start_pending = false;
    folder.set_record(&record)?;
    Ok(record)
}

fn track(qmp: &mut Qmp, record: &GuestRecord) -> Option<u64> {
    let process = ProcessHandle::open(Pid(record.process.pid)).ok()?;
    let ram = map_ram_files(&record.name, record.process.pid, &record.ram).ok()?;
    let origin = userfaultfd_origin(qmp, &process).ok()?;
    tracking::arm(&process, &ram, origin).ok()
}
