//! `restore`: plan, make files, start QEMU, serve or fill memory, load the
//! device state, run.
//!
//! Until the guest runs its record says `restoring`: the next command that finds it so ends
//! the QEMU, which never ran the guest, and starts over. From then on a dead page server
//! is replaced by the next `restore`.

mod new_identity;
mod predecessor;

use crate::args::RestoreArgs;
use crate::clock::{Clock, bring_forward};
use crate::context::{Context, LockedGuest, clear_predecessor, lacks_server, qmp_failure};
use crate::deferred_free::OldRam;
use crate::failure::{Code, Failure};
use crate::frozen_state::{all_forwarded, listed};
use crate::output::foreign;
use crate::progress::Progress;
use crate::ram_dir::ram_dir;
use crate::replace_journal;
use crate::server;
use crate::verbs::doctor::require_tracking;
use crate::verbs::run::ram_files;
use dewar_checkpoint::restore::{DeadRam, fill_files, hot_pages};
use dewar_guest_qemu::cmdline::require_sockets;
use dewar_guest_qemu::freeze::forward_again;
use dewar_guest_qemu::identity::renew_generation;
use dewar_guest_qemu::launch::{Inherited, kill, launch, make_ram_files, remove_files};
use dewar_guest_qemu::start_from_state::{
    Revival, ReviveError, SavedDisk, excluded_disks, plan_revival, start,
};
use dewar_guest_qemu::{
    QmpError, RunState, close_userfaultfd_device, maps_file, userfaultfd_origin,
};
use dewar_image::{DiskRecord, ImageReader, Store};
use dewar_memory::{Pid, ProcessHandle, UffdOrigin};
use dewar_registry::{Frozen, GuestFolder, GuestRecord, Origin, Phase, ProcessId};
use dewar_units::PAGE_BYTES;
use new_identity::NewIdentity;
use predecessor::{dead_ram, end_predecessor};
use serde_json::{Value, json};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

pub fn run(context: &Context, args: RestoreArgs) -> Result<(), Failure> {
    restore(context, args, false)
}

/// The same for a guest that is frozen in a store: until it runs, it stays so.
pub fn thaw(context: &Context, args: RestoreArgs) -> Result<(), Failure> {
    restore(context, args, true)
}

fn restore(context: &Context, args: RestoreArgs, thawing: bool) -> Result<(), Failure> {
    let began = Instant::now();
    require_tracking()?;
    let progress = Progress::new("reading the checkpoint");
    let resumed =
        if args.replace || args.new_identity { None } else { resume_service(context, &args)? };
    if let Some(resumed) = resumed {
        drop(progress);
        context.print(
            json!({"name": resumed, "resumed": true}),
            &format!("the page server of {resumed} was gone and is replaced; the guest runs on"),
        );
        return Ok(());
    }
    let store = context.store(args.store.store.as_deref())?;
    let id = store.find(&args.reference)?;
    let image = store.open_image(&id)?;
    let name = args.name.clone().unwrap_or_else(|| image.record().guest.clone());
    let mut machine = image.record().machine.clone();
    if args.new_identity || name != image.record().guest {
        renew_generation(&mut machine);
    }
    let identity = match args.new_identity {
        true => NewIdentity::choose(&mut machine, args.run)?,
        false => NewIdentity::default(),
    };
    let folder = context.registry.guest(&name)?;
    let mut lock = folder.lock()?;
    replace_journal::end_unfinished(&folder)?;
    let mut before = folder.record_if_any()?;
    if let Some(record) = before.clone().filter(|_| args.replace) {
        let taken = LockedGuest { folder: folder.clone(), record, lock };
        lock = end_predecessor(context, &args, &store, &image, taken)?;
        before = folder.record_if_any()?;
    }
    let mut dead = before.as_ref().map_or(Vec::new(), |before| dead_ram(before, image.record()));
    let ram_dir = ram_dir(args.ram_dir.clone());
    let mut old_ram = OldRam::new(clear_predecessor(&folder, Some(&ram_dir), thawing)?);
    let mut coming = 0;
    let needed = image.record().memory.pages * PAGE_BYTES as u64;
    let room = context.ram_room(&name, &ram_dir, args.overcommit);
    let free = room.map_or(0, |room| room.left());
    if free < needed {
        dead.clear();
        coming = old_ram.free(&ram_dir);
        if args.eager || free.saturating_add(coming) < needed {
            // All of it is written to at once, or whether it fits is still to be seen.
            old_ram.wait();
            coming = 0;
        }
    }
    let forget_new = || {
        if before.is_none() {
            let _ = folder.remove_all();
        }
    };
    let mut made = Vec::new();
    // Everything that can be found damaged is found before a QEMU starts.
    let mut read = || -> Result<_, Failure> {
        let device_state = image.blob("device state", &image.record().device_state)?;
        hot_pages(&image)?;
        let disks = saved_disks(&store, &image, &folder, &mut made)?;
        before.as_ref().map_or(Ok(()), |before| replace_journal::keep(&folder, before))?;
        Ok((device_state, disks))
    };
    let read = read();
    let (device_state, disks) = read.inspect_err(|_| {
        remove_files(&made);
        forget_new();
    })?;
    let result = bring_back(
        context,
        &args,
        &store,
        &image,
        &folder,
        (machine, identity),
        &ram_dir,
        device_state,
        disks,
        &progress,
        &mut made,
        Left { dead, coming, frozen: before.as_ref().and_then(|before| before.frozen.clone()) },
        thawing,
    );
    if let Err(failure) = result {
        replace_journal::end_loading(&folder)?;
        let now = folder.record_if_any();
        if !now.is_ok_and(|now| !now.is_some_and(|record| record.process.is_seen())) {
            // It was loaded and may run at any moment: its files are in use.
            return Err(failure
                .attention()
                .state("the guest is loaded but was not let run")
                .advice("the next dewar command that looks at it tries again"));
        }
        remove_files(&made);
        if let Err(why) = replace_journal::rollback(&folder) {
            let state = format!("no guest was started, nor the one before put back: {why}");
            return Err(failure.attention().state(state).advice("'dewar ps' tries again"));
        }
        forget_new();
        return Err(failure.state("no guest was started"));
    }
    let Restored { record, state, reused, unforwarded, identity } = result?;
    // If this fails, the next command that looks at the guest does it.
    let _ = replace_journal::forget(&folder);
    if let Some(origin) = &record.origin {
        folder.remove_other_base_disks(&origin.disks);
    }
    let identified = identity.hand_over(&record, &state);
    drop(progress);
    let ms = began.elapsed().as_secs_f64() * 1e3;
    let saved = UNIX_EPOCH + Duration::from_millis(image.record().created_ms);
    let clock = state
        .is_running()
        .then(|| bring_forward(args.clock, saved, &record.arguments, &record.folder));
    let excluded = excluded_disks(&image.record().machine);
    let empty = match excluded.is_empty() {
        true => String::new(),
        false => {
            format!("\nempty, since the checkpoint is without: {}", foreign(&excluded.join(", ")))
        }
    };
    let is_paused = state.is_paused();
    let how = match state.why_not_running() {
        Some(_) => format!("is {state}, as it was,"),
        None if is_paused && !args.paused => {
            "is paused, as it was (--run, or QMP 'cont', lets it run),".into()
        }
        None if is_paused => "is paused".into(),
        None => "runs".to_owned(),
    };
    let memory = if args.eager { "" } else { "; its memory is arriving" };
    let end = context.print_with(
        json!({
            "name": record.name, "checkpoint": id, "pid": record.process.pid, "lazy": !args.eager,
            "paused": is_paused, "state": state.to_string(), "total_ms": ms, "pages_reused": reused,
            "not_forwarded": unforwarded, "clock": clock.as_ref().map(Clock::told),
            "excluded": excluded, "new_addresses": identity.told(),
        }),
        &format!(
            "{} {how} as process {}, from checkpoint {id}, after {}{memory}{empty}{}{}",
            record.name,
            record.process.pid,
            crate::output::milliseconds(ms),
            listed(&unforwarded),
            clock.as_ref().map_or_else(String::new, Clock::line)
        ),
        identified.and_then(|()| all_forwarded(&record.name, &unforwarded)),
    );
    // Only now: the guest need not wait until the old one's memory is free.
    drop(old_ram);
    drop(lock);
    end
}

/// What the guest before left.
struct Left {
    /// RAM files from which pages may be taken.
    dead: Vec<File>,
    /// Bytes of others that are being given back.
    coming: u64,
    frozen: Option<Frozen>,
}

/// A guest that was brought back.
struct Restored {
    record: GuestRecord,
    /// How it stands.
    state: RunState,
    /// How many pages the dead guest's RAM still had, where it is known.
    reused: Option<u64>,
    /// What was said against ports that a frozen guest forwarded.
    unforwarded: Vec<String>,
    /// What of a copy is to be set in it.
    identity: NewIdentity,
}

#[expect(clippy::too_many_arguments, reason = "one sequence, told top to bottom")]
fn bring_back(
    context: &Context,
    args: &RestoreArgs,
    store: &Store,
    image: &ImageReader,
    folder: &GuestFolder,
    (machine, mut identity): (Value, NewIdentity),
    ram_dir: &Path,
    device_state: Vec<u8>,
    disks: Vec<SavedDisk>,
    progress: &Progress,
    made: &mut Vec<PathBuf>,
    left: Left,
    thawing: bool,
) -> Result<Restored, Failure> {
    let Left { dead, coming, frozen } = left;
    let name = folder.name();
    let ram_path = |id: &str| folder.ram_file(ram_dir, id);
    let regions: Vec<(String, u64)> = image
        .record()
        .memory
        .regions
        .iter()
        .map(|region| (region.name.clone(), region.pages * PAGE_BYTES as u64))
        .collect();
    let mut revival = plan_revival(machine, &disks, &regions, folder, ram_path)?;
    // Its overlays are removed with the rest where this fails.
    made.extend(revival.overlays.iter().cloned());
    if frozen.as_ref().is_some_and(|frozen| frozen.forwards.is_some()) {
        // When it is loaded, those that it had.
        revival.plan.run.forward_nothing().map_err(ReviveError::from)?;
    }
    // Of a frozen one it is known otherwise whether it ran.
    let ran = thawing || args.run || revival.machine.was_running();
    let room = |folder: &Path| context.ram_room(name, folder, args.overcommit);
    let owned_ram = make_ram_files(&revival.plan.run.regions, coming, room)?;
    made.extend(owned_ram.iter().cloned());
    require_sockets(&revival.plan.line, &revival.machine.folder).map_err(ReviveError::from)?;
    let image_id = &image.record().id.0;
    let (mut server, mut reused) = (None, None);
    if args.eager {
        progress.stage("reading memory");
        let dead = DeadRam::new(image, dead)?;
        reused = Some(fill_files(image, open_all(&revival)?, &dead, progress)?);
    } else {
        server = Some((server::prepare(context, folder, &store.url(), image_id, &dead)?, dead));
    }

    progress.stage("starting QEMU");
    let Revival { machine, plan, regions, .. } = revival;
    let qmp_path = folder.file("qmp.sock");
    let log = folder.file("console.log");
    let launched = launch(
        &machine.program,
        &plan.run,
        &machine.folder,
        &log,
        &qmp_path,
        Inherited::default(),
    )?;
    let mut qmp = launched.qmp;
    let started = (machine.program, plan.line);
    let record = GuestRecord::new(name, launched.process, started, machine.folder, qmp_path);
    let mut record = GuestRecord {
        ram: ram_files(&regions),
        owned_ram,
        phase: Phase::Restoring,
        start_pending: ran && !args.paused,
        origin: Some(Origin {
            store: store.url(),
            in_store: store.folder().is_some(),
            image: image_id.clone(),
            disks: disks.iter().flat_map(SavedDisk::files).collect(),
        }),
        frozen,
        ..record
    };
    folder.set_record(&record).inspect_err(|_| {
        // Nobody would know of it.
        kill(&record.process);
    })?;
    for file in &record.ram {
        if !maps_file(record.process.pid, &file.path) {
            let what = format!("QEMU did not take its RAM from {}", file.path.display());
            return Err(Failure::new(Code::Failed, what));
        }
    }
    let said = |error: QmpError| Failure::new(Code::Failed, format!("its network cards: {error}"));
    identity.find_cards(&mut qmp).map_err(said)?;
    if let Some((server, _dead)) = server {
        progress.stage("starting the page server");
        let failed = |error: String| {
            Failure::new(Code::Failed, format!("preparing to serve its memory: {error}"))
        };
        let process = ProcessHandle::open(Pid(record.process.pid))
            .map_err(|error| failed(error.to_string()))?;
        let origin =
            userfaultfd_origin(&mut qmp, &process).map_err(|error| failed(error.to_string()))?;
        let attached = server.attach(&record.process, origin);
        close_userfaultfd_device(&mut qmp);
        record.server = Some(attached?);
        folder.set_record(&record)?;
    }
    progress.stage("loading the devices");
    server::load_served(folder, &record, &mut qmp, device_state)?;
    identity.pull_cables(&mut qmp).map_err(said)?;
    let ports = record.frozen.take().and_then(|frozen| frozen.forwards);
    let unforwarded = ports.map_or_else(Vec::new, |ports| forward_again(&mut qmp, &ports));
    // One that has powered off, say, is as it was: nothing lets it run.
    let mut state = RunState::of(&mut qmp).map_err(|error| qmp_failure(&record, &error))?;
    record.start_pending &= state.is_paused();
    // From here on the guest may have run: it is never started over.
    record.phase = Phase::Running;
    folder.set_record(&record)?;
    progress.stage("loaded");
    if record.start_pending {
        if let Err(error) = start(&mut qmp) {
            if let QmpError::Refused { .. } = error {
                // It has not run, and will not: all is undone.
                record.phase = Phase::Restoring;
                folder.set_record(&record)?;
            }
            return Err(Failure::new(Code::Failed, format!("starting the guest: {error}")));
        }
        record.start_pending = false;
        // It runs; where this cannot be written, the next command sees that and notes it.
        let _ = folder.set_record(&record);
        state = RunState::named("running");
    }
    progress.stage("started");
    Ok(Restored { record, state, reused, unforwarded, identity })
}

/// Where the guest that is asked for runs but its page server is gone: starts
/// another.
fn resume_service(context: &Context, args: &RestoreArgs) -> Result<Option<String>, Failure> {
    let name = args.name.as_deref().unwrap_or(&args.reference);
    let named = |name: &str| context.registry.guest(name).is_ok_and(|it| it.record().is_ok());
    // By its own name, or by that of a checkpoint that it came from.
    let name = if named(name) {
        name.to_owned()
    } else {
        let Ok(store) = context.store(args.store.store.as_deref()) else { return Ok(None) };
        let Ok(id) = store.find(&args.reference) else { return Ok(None) };
        let guest = args.name.clone().unwrap_or(store.record(&id)?.guest);
        if !named(&guest) {
            return Ok(None);
        }
        guest
    };
    let mut resumed = false;
    context.hold_after(&name, |folder, record| {
        if !lacks_server(folder, record) {
            return Ok(());
        }
        let origin = record.origin.as_ref().ok_or_else(|| {
            Failure::new(Code::Failed, format!("'{name}' was not restored from a checkpoint"))
        })?;
        // One that somebody stopped would be in the way of the next.
        if let Some(server) = record.server.filter(ProcessId::is_halted) {
            kill(&server);
        }
        let server = server::prepare(context, folder, &origin.store, &origin.image, &[])?;
        // What the first made is still there; QEMU itself may wait for a page.
        record.server = Some(server.attach(&record.process, UffdOrigin::Syscall)?);
        folder.set_record(record)?;
        resumed = true;
        Ok(())
    })?;
    Ok(resumed.then_some(name))
}

/// The image's disks as files, checked: those of the store itself, where it is
/// a folder, or copies in the guest's folder.
fn saved_disks(
    store: &Store,
    image: &ImageReader,
    folder: &GuestFolder,
    made: &mut Vec<PathBuf>,
) -> Result<Vec<SavedDisk>, Failure> {
    let bases = match store.folder() {
        Some(_) => folder.base_disks(),
        None => folder.make_base_disks()?,
    };
    let mut saved = |disk: &DiskRecord| -> Result<SavedDisk, Failure> {
        let (path, below) = store.disk_file(disk, &bases, made)?;
        let (name, format) = (disk.name.clone(), disk.format.clone());
        Ok(SavedDisk { name, path, below, format, virtual_bytes: disk.virtual_bytes })
    };
    image.record().disks.iter().map(&mut saved).collect()
}

fn open_all(revival: &Revival) -> Result<Vec<File>, Failure> {
    revival
        .regions
        .iter()
        .map(|region| {
            File::options().read(true).write(true).open(&region.path).map_err(|error| {
                Failure::new(Code::Failed, format!("{}: {error}", region.path.display()))
            })
        })
        .collect()
}
