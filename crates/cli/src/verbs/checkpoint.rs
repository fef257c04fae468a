use crate::args::{CheckpointArgs, CodecChoice, DedupChoice};
use crate::context::{Context, attach};
use crate::failure::{Code, Failure, GONE};
use crate::guardian::{Guardian, Pauses};
use crate::output::{foreign, milliseconds};
use crate::own_session::own_session;
use crate::progress::Progress;
use crate::tracking::{self, Tracking};
use dewar_checkpoint::{
    Base, CheckpointOptions, CheckpointOutcome, DirtyStoreOptions, Observer, Step, checkpoint,
};
use dewar_codec::Codec;
use dewar_guest::{Guest, Health};
use dewar_guest_qemu::QemuGuest;
use dewar_guest_qemu::start_from_state::excluded_disks;
use dewar_image::{Dedup, DirtyStore, EpochRecord, Location, Record, Store};
use dewar_kernel::{OwnSession, available_memory};
use dewar_registry::GuestFolder;
use dewar_units::{ByteSize, PAGE_BYTES};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

pub fn run(context: &Context, args: CheckpointArgs) -> Result<(), Failure> {
    let progress = Progress::new("looking at the guest");
    let (mut guest, guest_folder, lock) = attach(context, &args.name, &progress)?;
    guest.exclude(&args.exclude).map_err(|(wanted, has)| {
        let what = format!("guest '{}' has no writable disk '{wanted}'", args.name);
        let has = if has.is_empty() { "it has none".to_owned() } else { has.join(", ") };
        Failure::new(Code::NotFound, what)
            .state("the guest was not touched")
            .advice(format!("its disks: {has}"))
    })?;
    let location = context.store_location(args.store.store.as_deref())?;
    let store = Store::open_or_create(&location)
        .map_err(|error| Failure::from(error).state("the guest was not touched"))?;
    let dirty_store =
        args.dirty_store.as_deref().map(|url| DirtyStore::open(&Location::parse(url)?));
    let dirty_store = dirty_store
        .transpose()
        .map_err(|error| Failure::from(error).state("the guest was not touched"))?;
    let wanted = Wanted {
        full: args.full,
        max_pause: args.max_pause,
        buffer: args.buffer,
        codec: args.codec,
        dedup: dedup(args.dedup, args.hashes),
        dirty: dirty_store.map(|store| DirtyStoreOptions {
            store,
            epoch: args.epoch,
            spread_pages: args.spread.map_or(0, |size| size.0 / PAGE_BYTES as u64),
        }),
        session: own_session(),
        tag: args.tag,
    };
    let mut guardian = None;
    let result = take(&mut guest, &guest_folder, &store, wanted, &progress, |guest| {
        let url = store.url();
        let started = Guardian::start(context, &args.name, Some(&url), guest.qmp(), &lock)?;
        let pauses = started.pauses()?;
        guardian = Some(started);
        Ok(Some(pauses))
    });
    drop(progress);
    let Some(guardian) = guardian else { return result.map(drop) };
    let health = guest.health();
    if result.is_ok() || !matches!(health, Health::Unknown(_)) {
        guardian.dismiss();
    }
    let taken = result.map_err(|error| {
        let has_one =
            || store.records().is_ok_and(|(all, _)| all.iter().any(|it| it.guest == args.name));
        explain(error, &health, has_one)
    })?;
    let mut told = to_json(&taken.record, &store);
    told["tracked"] = taken.by_tracking.into();
    told["max_pause_ms"] = (args.max_pause.as_secs_f64() * 1e3).into();
    context.print(told, &describe(&taken, &store.url(), args.max_pause));
    if health == Health::IoStalled {
        let what = format!("the checkpoint of '{}' was made", args.name);
        return Err(Failure::new(Code::Attention, what)
            .state(health.to_string())
            .already_printed());
    }
    Ok(())
}

/// How a checkpoint shall be taken.
pub struct Wanted {
    pub full: bool,
    pub max_pause: Duration,
    pub buffer: Option<ByteSize>,
    pub codec: CodecChoice,
    pub dedup: Dedup,
    pub dirty: Option<DirtyStoreOptions>,
    pub session: Option<OwnSession>,
    pub tag: Option<String>,
}

fn dedup(choice: DedupChoice, hashes: bool) -> Dedup {
    match choice {
        // Its hashes are as good.
        DedupChoice::Store => Dedup::Store,
        _ if hashes => Dedup::Known,
        DedupChoice::Image => Dedup::Image,
        DedupChoice::Off => Dedup::Off,
    }
}

impl Default for Wanted {
    fn default() -> Self {
        Self {
            full: false,
            max_pause: Duration::from_millis(25),
            buffer: None,
            codec: CodecChoice::Zstd,
            dedup: Dedup::Off,
            dirty: None,
            session: None,
            tag: None,
        }
    }
}

/// Tells a guardian of the pause, and passes everything on.
struct Guarded<'p> {
    progress: &'p Progress,
    pauses: Option<Pauses>,
    max_pause: Duration,
}

impl Observer for Guarded<'_> {
    fn step(&self, step: Step) {
        if let Some(pauses) = &self.pauses {
            match step {
                Step::Stopping => pauses.begin(Some(self.max_pause)),
                Step::Resumed | Step::PutBack => pauses.end(),
                _ => {}
            }
        }
        self.progress.step(step);
    }

    fn progress(&self, done: u64, of: u64) {
        self.progress.progress(done, of);
    }
}

/// Takes a checkpoint and notes what is tracked from it on. `guard` is called
/// before the guest is touched; what it returns is told of the pause.
pub fn take(
    guest: &mut QemuGuest,
    folder: &GuestFolder,
    store: &Store,
    wanted: Wanted,
    progress: &Progress,
    guard: impl FnOnce(&QemuGuest) -> Result<Option<Pauses>, Failure>,
) -> Result<CheckpointOutcome, Failure> {
    let machine =
        guest.machine().map_err(|error| Failure::from(error).state("the guest was not touched"))?;
    let tracking = Tracking::load(folder, guest.record())?;
    let unreadable = |why| progress.aside(|| eprintln!("dewar: all pages are stored: {why}"));
    let base = if wanted.full {
        None
    } else {
        tracking::base(store, guest.record(), &guest.ram(), tracking.as_ref(), unreadable)?
    };
    let scratch = folder.make_scratch()?;
    let (is_readable, pauses) = std::thread::scope(|scope| {
        // The guardian takes as long to start as the table to be read.
        let table = scope.spawn(|| match &base {
            Some((image, _)) => image.read_table_ahead(),
            None => Ok(()),
        });
        let pauses = guard(guest)?;
        let table = table.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, Failure>((table, pauses))
    })?;
    let base = match is_readable {
        Ok(()) => base,
        Err(why) => {
            unreadable(why);
            None
        }
    };
    let options = CheckpointOptions {
        base: match &base {
            None => Base::Nothing,
            Some((image, None)) => Base::Compared(image),
            Some((image, Some((tracker, before)))) => Base::Tracked(image, *tracker, before),
        },
        known_tracker: tracking.as_ref().map(|tracking| tracking.tracker),
        max_pause: wanted.max_pause,
        buffer_bytes: wanted.buffer.map_or_else(|| default_buffer(guest), |size| size.0),
        codec: match wanted.codec {
            CodecChoice::Zstd => Codec::Zstd,
            CodecChoice::Lz4 => Codec::Lz4,
            CodecChoice::Raw => Codec::Raw,
        },
        level: ZSTD_LEVEL,
        dedup: wanted.dedup,
        dirty: wanted.dirty,
        session: wanted.session,
        tag: wanted.tag,
        machine,
        scratch,
    };
    progress.stage("guarded");
    if let Some(tracking) = tracking {
        tracking.invalidate(folder)?;
    }
    // One that stood still before may stand still as long as it takes.
    let pauses = pauses.filter(|_| guest.health() == Health::Running);
    let observer = Guarded { progress, pauses, max_pause: wanted.max_pause };
    let result = checkpoint(guest, store, options, &observer);
    folder.remove_scratch();
    let taken = result?;
    let since = Some((store.id(), taken.record.id.clone()));
    let process = guest.record().process;
    // Without it the next checkpoint compares; it loses nothing.
    let tracking = Tracking { process, tracker: taken.tracker, since, before: Vec::new() };
    let _ = tracking.save(folder);
    Ok(taken)
}

/// So many disks take longer to be put aside than anything else in a pause.
const MANY_DISKS: usize = 8;

/// Zstandard's: a fifth faster than level 1, for 6 % more bytes of text and
/// programs.
const ZSTD_LEVEL: i32 = -1;

/// A failed checkpoint, with the state that the guest is in.
fn explain(failure: Failure, health: &Health, has_one: impl FnOnce() -> bool) -> Failure {
    let failure = failure.state(format!("no checkpoint was made; {health}"));
    match health {
        Health::Unknown(_) => failure.attention().advice("'dewar ps' tries to put it right"),
        Health::IoStalled => failure.attention(),
        Health::Gone if has_one() => failure.attention().advice(GONE),
        Health::Gone => failure.attention().advice("there is no checkpoint of it"),
        _ => failure,
    }
}

/// Half of the guest's RAM, but at most half of what the host has free.
fn default_buffer(guest: &QemuGuest) -> u64 {
    let half = guest.ram().pages() * PAGE_BYTES as u64 / 2;
    half.max(64 << 20).min(available_memory().unwrap_or(1 << 30) / 2)
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
        "excluded": excluded_disks(&record.machine),
    })
}

fn describe(taken: &CheckpointOutcome, store: &str, max_pause: Duration) -> String {
    let record = &taken.record;
    let summary = &record.summary;
    let counts = record.memory.counts;
    let stored = counts.compressed + counts.raw + counts.keyed;
    let disks = match record.disks.len() {
        0 => String::new(),
        1 => " and 1 disk".to_owned(),
        count => format!(" and {count} disks"),
    };
    let tag = record.tag.as_ref().map_or(String::new(), |tag| format!(" '{}'", foreign(tag)));
    let mut text = format!(
        "{}{tag} of {}: {} of RAM{disks} in {}, {} stored in {store}\n\
         paused {}, after {}; of {} pages {} stored, {} zero, {} never touched",
        record.id,
        record.guest,
        ByteSize(record.memory.pages * PAGE_BYTES as u64),
        milliseconds(summary.total_ms),
        ByteSize(summary.stored_bytes),
        milliseconds(summary.pause_ms),
        epochs(&summary.epochs),
        record.memory.pages,
        stored,
        counts.zero,
        counts.hole,
    );
    if counts.keyed > 0 {
        let own = record.keyed.values().find(|source| source.image == record.id);
        let store = own.map_or("the dirty store", |source| source.store.as_str());
        let sent = summary.captured.dirty_store + summary.captured.spread;
        text.push_str(&format!("\n{} of them in {store}, of {sent} sent there", counts.keyed));
    }
    let excluded = excluded_disks(&record.machine);
    if !excluded.is_empty() {
        text.push_str(&format!("\nleft out: {}", foreign(&excluded.join(", "))));
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
        let limit = dewar_units::format_duration(max_pause);
        text.push_str(&format!("\nthe pause was longer than --max-pause {limit}: "));
        let took = |step: &str| summary.stages.iter().find(|it| it.step == step).map(|it| it.at_ms);
        let state_ms = took("state-saved").zip(took("stopped")).map_or(0.0, |(to, from)| to - from);
        let last = summary.epochs.last().map_or(0, |epoch| epoch.dirty_pages);
        text.push_str(&match state_ms > summary.pause_ms / 2.0 {
            true if record.disks.len() > MANY_DISKS => format!(
                "QEMU took {} to put its {} disks aside and to save its devices",
                milliseconds(state_ms),
                record.disks.len()
            ),
            true => format!(
                "QEMU took {} to save its devices, with the memory of a display if it has one",
                milliseconds(state_ms)
            ),
            false => format!("the guest still wrote {last} pages in the last epoch"),
        });
        if summary.captured.overflowed > 0 {
            let over = summary.captured.overflowed;
            text.push_str(&format!(", and {over} found no room: a larger --buffer may help"));
        }
    }
    text
}

/// How many epochs there were, and of how many pages the last ones.
fn epochs(all: &[EpochRecord]) -> String {
    const TOLD: usize = 4;
    let last = &all[all.len().saturating_sub(TOLD)..];
    let pages: Vec<String> = last.iter().map(|epoch| epoch.dirty_pages.to_string()).collect();
    let more = if all.len() > TOLD { "… " } else { "" };
    match all.len() {
        1 => format!("1 epoch of {} pages", pages[0]),
        count => format!("{count} epochs of {more}{} pages", pages.join(", ")),
    }
}
