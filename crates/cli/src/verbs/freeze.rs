//! `freeze`: a guest that needs no process.

use crate::args::FreezeArgs;
use crate::context::{Context, attach_within};
use crate::failure::{Code, Failure, GONE};
use crate::frozen_state::sums_of;
use crate::guardian::Guardian;
use crate::output::milliseconds;
use crate::progress::Progress;
use crate::tracking::{Tracking, written_before};
use crate::verbs::checkpoint::{self, Wanted};
use crate::verbs::fan_out::Each;
use dewar_guest::{Guest, Health};
use dewar_guest_qemu::QemuGuest;
use dewar_guest_qemu::freeze::{
    check, check_place, end_process, forwarded, state_file, stop_and_save,
};
use dewar_image::Store;
use dewar_memory::sum;
use dewar_registry::{Forward, Frozen, GuestFolder, GuestRecord, Kept, KeptDisk, Phase, SUMS_FILE};
use dewar_units::ByteSize;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

pub fn run(context: &Context, args: FreezeArgs) -> Result<(), Failure> {
    let Some(name) = &args.which.name else {
        let mut more: Vec<OsString> = Vec::new();
        more.extend(args.no_checksum.then(|| "--no-checksum".into()));
        more.extend(args.to_store.iter().map(|url| match url.as_str() {
            "" => "--to-store".into(),
            url => format!("--to-store={url}").into(),
        }));
        more.push(format!("--wait={}s", args.wait.as_secs_f64()).into());
        let running = |record: &GuestRecord| record.process.is_alive();
        let end = |_: &Value| "frozen".to_owned();
        let verb = Each { verb: "freeze", doing: "freezing", done: "frozen", end: &end };
        return verb.of(context, running, args.which.jobs(2), &more);
    };
    let began = Instant::now();
    let progress = Progress::new("looking at the guest");
    let (mut guest, folder, lock) = attach_within(context, name, args.wait, &progress)?;
    let untouched = |failure: Failure| failure.state("the guest was not touched");
    let checked = check(&mut guest).map_err(|error| untouched(error.into()))?;
    if args.to_store.is_none() {
        check_place(&guest).map_err(|error| untouched(error.into()))?;
    }
    let store = args.to_store.as_deref().map(|url| {
        let location = context.store_location(Some(url).filter(|url| !url.is_empty()))?;
        Store::open_or_create(&location).map_err(|error| untouched(error.into()))
    });
    let store = store.transpose()?;
    let url = store.as_ref().map(Store::url);
    let guardian = Guardian::start(context, name, url.as_deref(), guest.qmp(), &lock)?;
    let pauses = guardian.pauses()?;
    // It stands still as long as this takes.
    pauses.begin(None);
    progress.stage("stopping the guest");
    // From here on the record says where its files are, for the command that cleans up.
    let placed = GuestRecord { ram: checked.ram.clone(), ..guest.record().clone() };
    folder.set_record(&placed)?;
    let frozen = match &store {
        None => keep_in_place(&mut guest, &folder, &checked, !args.no_checksum, &progress),
        Some(store) => keep_in_store(&mut guest, &folder, store, &progress),
    };
    let frozen = frozen.inspect(|_| progress.signal_at("kept")).and_then(|frozen| {
        let record = GuestRecord { phase: Phase::Frozen, frozen: Some(frozen), ..checked.clone() };
        guest.ensure_stopped()?;
        folder.set_record(&record)?;
        // Who let it run until now is heard; from here on it ends.
        guest.ensure_stopped()?;
        Ok(record)
    });
    let record = match frozen {
        Ok(record) => record,
        Err(failure) => {
            // Should it say so already: it must not be ended for it.
            let _ = folder.set_record(&placed);
            let _ = guest.rollback();
            pauses.end();
            folder.remove_kept(&checked.ram);
            let health = guest.health();
            let failure = failure.state(format!("the guest was not frozen; {health}"));
            if let Health::Unknown(_) = health {
                // The guardian goes on with it when we end.
                return Err(failure.attention().advice("'dewar ps' tries to put it right"));
            }
            guardian.dismiss();
            return Err(match health {
                Health::Gone => failure.attention().advice(GONE),
                _ => failure,
            });
        }
    };
    progress.signal_at("on record");
    end_process(&mut guest, &record)?;
    if store.is_some() {
        folder.remove_ram(&record)?;
    }
    guardian.dismiss();
    drop(progress);
    report(context, &record, began.elapsed().as_secs_f64() * 1e3);
    Ok(())
}

/// Writes what there is beside the RAM. The guest stands still from here on.
fn keep_in_place(
    guest: &mut QemuGuest,
    folder: &GuestFolder,
    checked: &GuestRecord,
    checksums: bool,
    progress: &Progress,
) -> Result<Frozen, Failure> {
    let was_running = guest.health() == Health::Running;
    let tracking = Tracking::load(folder, guest.record())?;
    if let Some(tracking) = &tracking {
        tracking.invalidate(folder)?;
    }
    let bytes = stop_and_save(guest, checked)?;
    progress.stage("writing its state");
    let tracking = tracking.filter(|tracking| tracking.since.is_some());
    let before = tracking.as_ref().and_then(|tracking| {
        written_before(guest.process(), &guest.ram(), tracking).ok().flatten()
    });
    let ram = &checked.ram;
    let state = state_file(folder, ram);
    write_private(&state, &bytes).map_err(|error| {
        Failure::new(Code::Failed, format!("cannot write {}: {error}", state.display()))
    })?;
    if checksums {
        progress.stage("summing up memory");
        folder.write(SUMS_FILE, &sums_of(ram)?)?;
    }
    if let Some((tracking, before)) = tracking.zip(before) {
        let _ = tracking.continued(tracking.process, 0, &before).save(folder);
    }
    let found = guest.found();
    // QEMU has given them up with the state.
    let disks = found.disks.iter().map(|disk| checked.folder.join(&disk.file));
    let kept = Kept::InPlace {
        state,
        sum: format!("{:032x}", sum(&bytes)),
        sums: checksums,
        disks: disks.filter_map(|path| KeptDisk::of(&path)).collect(),
    };
    let machine = found.machine.clone();
    Ok(Frozen { was_running, machine, forwards: ports(guest), kept })
}

/// Takes a checkpoint after which the guest does not go on.
fn keep_in_store(
    guest: &mut QemuGuest,
    folder: &GuestFolder,
    store: &Store,
    progress: &Progress,
) -> Result<Frozen, Failure> {
    let was_running = guest.health() == Health::Running;
    guest.hold_still()?;
    progress.stage("saving memory");
    let taken = checkpoint::take(guest, folder, store, Wanted::default(), progress, |_| Ok(None))?;
    let machine = guest.found().machine.clone();
    let kept = Kept::InStore { store: store.url(), image: taken.record.id.0 };
    Ok(Frozen { was_running, machine, forwards: ports(guest), kept })
}

/// The ports that it forwards, last of all: its user may add some meanwhile. Of a QEMU that
/// has ended those of its command line are taken.
fn ports(guest: &mut QemuGuest) -> Option<Vec<Forward>> {
    forwarded(guest).ok()
}

fn write_private(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn report(context: &Context, record: &GuestRecord, ms: f64) {
    let bytes: u64 = record.ram.iter().map(|file| file.bytes).sum();
    let name = &record.name;
    let (place, image) = match record.frozen.as_ref().map(|frozen| &frozen.kept) {
        Some(Kept::InStore { image, .. }) => (format!("in checkpoint {image}"), Some(image)),
        _ => ("where it was".to_owned(), None),
    };
    context.print(
        json!({"name": name, "memory_bytes": bytes, "checkpoint": image, "total_ms": ms}),
        &format!(
            "{name} is frozen after {}; its {} of memory are {place}\n'dewar thaw {name}' lets it \
             go on",
            milliseconds(ms),
            ByteSize(bytes)
        ),
    );
}
