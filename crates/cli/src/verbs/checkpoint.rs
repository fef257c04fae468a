use crate::args::{CheckpointArgs, CodecChoice, DedupChoice};
use crate::context::{Context, Held, wait_for_memory};
use crate::failure::Failure;
use crate::guardian::Guardian;
use crate::output::milliseconds;
use crate::progress::Progress;
use crate::tracking::{self, Tracking};
use dewar_checkpoint::{Base, CheckpointOptions, Taken, checkpoint};
use dewar_codec::Codec;
use dewar_guest::{Guest, Health};
use dewar_guest_qemu::QemuGuest;
use dewar_image::{Dedup, DirtyStore, Location, Record, Store};
use dewar_units::{ByteSize, PAGE_BYTES};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

pub fn run(context: &Context, args: CheckpointArgs) -> Result<(), Failure> {
    let progress = Progress::new("looking at the guest");
    let held = context.hold(&args.name)?;
    held.require_alive()?;
    wait_for_memory(&held, &progress)?;
    let location = context.store_location(args.store.store.as_deref())?;
    let store = Store::open_or_create(&location)
        .map_err(|error| Failure::from(error).state("the guest was not touched"))?;
    let dirty_store =
        args.dirty_store.as_deref().map(|url| DirtyStore::open(&Location::parse(url)?));
    let dirty_store = dirty_store
        .transpose()
        .map_err(|error| Failure::from(error).state("the guest was not touched"))?;
    let Held { folder: guest_folder, record, lock } = held;
    let mut guest = QemuGuest::attach(guest_folder.clone(), record)
        .map_err(|error| Failure::from(error).state("the guest was not touched"))?;
    let machine =
        guest.machine().map_err(|error| Failure::from(error).state("the guest was not touched"))?;
    let tracking = Tracking::load(&guest_folder, guest.record())?;
    let base = if args.full {
        None
    } else {
        tracking::base(&store, &args.name, &guest.ram(), tracking.as_ref())?
    };
    let options = CheckpointOptions {
        base: match &base {
            None => Base::Nothing,
            Some((image, None)) => Base::Compared(image),
            Some((image, Some((tracker, before)))) => Base::Tracked(image, *tracker, before),
        },
        known_tracker: tracking.as_ref().map(|tracking| tracking.tracker),
        max_pause: args.max_pause,
        buffer_bytes: args.buffer.map_or_else(|| default_buffer(&guest), |size| size.0),
        codec: match args.codec {
            CodecChoice::Zstd => Codec::Zstd,
            CodecChoice::Lz4 => Codec::Lz4,
            CodecChoice::Raw => Codec::Raw,
        },
        level: ZSTD_LEVEL,
        dedup: match args.dedup {
            DedupChoice::Off => Dedup::Off,
            DedupChoice::Image => Dedup::Image,
            DedupChoice::Store => Dedup::Store,
        },
        dirty: dirty_store.map(|store| (store, args.epoch)),
        tag: args.tag,
        machine,
        scratch: guest_folder.make_scratch()?,
    };
    let guardian = Guardian::start(context, &args.name, Some(&store.url()), guest.qmp(), &lock)?;
    progress.stage("guarded");
    if let Some(tracking) = tracking {
        tracking.strike_out(&guest_folder)?;
    }
    let result = checkpoint(&mut guest, &store, options, &progress);
    drop(progress);
    guest_folder.remove_scratch();
    let health = guest.health();
    if result.is_ok() || matches!(health, Health::Running | Health::Paused | Health::Gone) {
        guardian.dismiss();
    }
    let taken = result.map_err(|error| explain(Failure::from(error), &health))?;
    let since = Some((store.id(), taken.record.id.clone()));
    let process = guest.record().process;
    // Without it the next checkpoint compares; it loses nothing.
    let tracking = Tracking { process, tracker: taken.tracker, since, before: Vec::new() };
    let _ = tracking.save(&guest_folder);
    let mut told = to_json(&taken.record, &store);
    told["tracked"] = taken.by_tracking.into();
    context.print(told, &describe(&taken, args.max_pause));
    Ok(())
}

/// Zstandard's: a fifth faster than level 1, for 6 % more bytes of text and
/// programs.
const ZSTD_LEVEL: i32 = -1;

/// A failed checkpoint, with the state that the guest is in.
fn explain(failure: Failure, health: &Health) -> Failure {
    let failure = failure.state(format!("no checkpoint was made; {health}"));
    match health {
        Health::Unknown(_) => failure.attention().advice("'dewar ps' tries to put it right"),
        _ => failure,
    }
}

/// Half of the guest's RAM, but at most half of what the host has free.
fn default_buffer(guest: &QemuGuest) -> u64 {
    let half = guest.ram().pages() * PAGE_BYTES as u64 / 2;
    half.max(64 << 20).min(available_memory() / 2)
}

fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.map_or(1 << 30, |kib| kib << 10)
}

pub fn to_json(record: &Record, store: &Store) -> Value {
    let counts = record.memory.counts;
    let dirty_stores: BTreeSet<&str> = record.keyed.values().map(|it| it.store.as_str()).collect();
    json!({
        "checkpoint": record.id,
        "guest": record.guest,
        "memory_bytes": record.memory.pages * PAGE_BYTES as u64,
        "pages": {
            "total": record.memory.pages,
            "zero": counts.zero + counts.hole,
            "stored": counts.compressed + counts.raw + counts.keyed,
            "hole": counts.hole,
            "compressed": counts.compressed,
            "raw": counts.raw,
            "dirty_store": counts.keyed,
            "unchanged": counts.inherited,
            "duplicate": record.summary.duplicate_pages,
        },
        "parent": record.parent,
        "stored_bytes": record.summary.stored_bytes,
        "shared_bytes": record.summary.inherited_bytes,
        "pause_ms": record.summary.pause_ms,
        "total_ms": record.summary.total_ms,
        "captured": record.summary.captured,
        "epochs": record.summary.epochs,
        "stages": record.summary.stages,
        "tag": record.tag,
        "store": store.url(),
        "dirty_stores": dirty_stores,
        "created_ms": record.created_ms,
        "disks": record.disks.len(),
    })
}

fn describe(taken: &Taken, max_pause: Duration) -> String {
    let record = &taken.record;
    let summary = &record.summary;
    let counts = record.memory.counts;
    let stored = counts.compressed + counts.raw + counts.keyed;
    let disks = match record.disks.len() {
        0 => String::new(),
        1 => " and 1 disk".to_owned(),
        count => format!(" and {count} disks"),
    };
    let mut text = format!(
        "{} of {}: {} of RAM{disks} in {}, {} stored\n\
         paused {}, after {} epochs; pages: {} stored, {} zero, {} never touched",
        record.id,
        record.guest,
        ByteSize(record.memory.pages * PAGE_BYTES as u64),
        milliseconds(summary.total_ms),
        ByteSize(summary.stored_bytes),
        milliseconds(summary.pause_ms),
        summary.epochs.len(),
        stored,
        counts.zero,
        counts.hole,
    );
    if counts.keyed > 0 {
        let own = record.keyed.values().find(|source| source.image == record.id);
        let store = own.map_or("the dirty store", |source| source.store.as_str());
        let sent = summary.captured.dirty_store;
        text.push_str(&format!("\n{} of them in {store}, of {sent} sent there", counts.keyed));
    }
    if let Some(parent) = &record.parent {
        let how =
            if taken.by_tracking { "known by tracking since" } else { "found by comparing with" };
        text.push_str(&format!("\n{} pages as in {parent}, {how} it", counts.inherited));
    }
    if summary.duplicate_pages > 0 {
        text.push_str(&format!("\n{} pages are stored elsewhere already", summary.duplicate_pages));
    }
    if summary.pause_ms > max_pause.as_secs_f64() * 1e3 {
        let last = summary.epochs.last().map_or(0, |epoch| epoch.dirty_pages);
        text.push_str(&format!(
            "\nthe pause was longer than --max-pause {}: the guest still wrote {last} pages in the \
             last epoch; a larger --buffer may help",
            dewar_units::format_duration(max_pause)
        ));
    }
    text
}
