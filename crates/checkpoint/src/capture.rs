//! Live checkpoint: capture apart from encoding.
//!
//! ```text
//!  running  1. arm      every write is recorded from now on; I/O is drained
//!           2. bulk     idle workers encode every page that stands still, but
//!                       those known to be as the parent has them; with a dirty
//!                       store, epochs beside it send what was written there,
//!                       and in between a part of what stands still
//!           3. epochs   take the dirty set, drain, copy its pages to a buffer;
//!                       again, each shorter than the last
//!  stopped  4. stop     disks are frozen and the device state is saved; then
//!                       look what was written since and copy it
//!  running  5. behind   encode the buffer, copy the disks, commit
//! ```
//!
//! A page enters the image as it was at the stop: its last copy was made after
//! its last recorded write (see [`dewar_memory::WriteTracker`]), or in the
//! pause. A page that none of the stages captured fails the checkpoint
//! ([`dewar_image::ImageError::Incomplete`]); it never becomes a zero page.
//!
//! Whatever fails, the guest is put back, the image does not exist, and the
//! dirty sets go back to the tracker.

use crate::CheckpointError;
use crate::allowance::Allowance;
use crate::behind::{GuestState, behind};
use crate::bulk::{Pass, Tally};
use crate::capture_context::CaptureContext;
use crate::captures::{Captures, EpochSink};
use crate::observe::{Observer, Step, Timeline};
use crate::overflow::Overflow;
use crate::page_sender::bulk_with_epochs;
use dewar_capture::{CaptureStep, Epoch, Epochs, Workers, converge, cores};
use dewar_codec::Compression;
use dewar_guest::{DiskTracking, Guest, GuestError, Health};
use dewar_image::{
    CaptureCounts, Dedup, DirtyStore, EpochRecord, ImageOptions, ImageReader, ImageWriter,
    MemoryRecord, Record, RegionRecord, Store, Summary,
};
use dewar_kernel::OwnSession;
use dewar_memory::{Ram, RamRegion, WriteTracker};
use dewar_units::PageSet;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

/// What a checkpoint is taken on top of.
#[derive(Debug, Clone, Copy)]
pub enum Base<'s> {
    /// Nothing: all pages are stored.
    Nothing,
    /// An image; what differs from it is found by comparing.
    Compared(&'s ImageReader),
    /// An image; writes were tracked ever since its pause, by the tracker with
    /// this identity, but for those pages, which were written before it began.
    /// Compared where the tracking was lost.
    Tracked(&'s ImageReader, u64, &'s PageSet),
}

impl<'s> Base<'s> {
    fn image(self) -> Option<&'s ImageReader> {
        match self {
            Self::Nothing => None,
            Self::Compared(image) | Self::Tracked(image, ..) => Some(image),
        }
    }
}

/// A checkpoint that was taken.
#[derive(Debug)]
pub struct CheckpointOutcome {
    /// The image's record.
    pub record: Record,
    /// The identity of the tracker that goes on tracking from its pause.
    pub tracker: u64,
    /// Whether the pages to store were known by tracking.
    pub by_tracking: bool,
}

/// A dirty store beside the store of the image.
#[derive(Debug)]
pub struct DirtyStoreOptions {
    /// Where it is.
    pub store: DirtyStore,
    /// How often the pages written meanwhile are sent there.
    pub epoch: Duration,
    /// How many pages that stand still may go there, too.
    pub spread_pages: u64,
}

/// How to take a checkpoint.
#[derive(Debug)]
pub struct CheckpointOptions<'s> {
    /// What it is taken on top of.
    pub base: Base<'s>,
    /// The identity of a tracker of ours, perhaps still in the guest.
    pub known_tracker: Option<u64>,
    /// The longest that the guest should stand still.
    pub max_pause: Duration,
    /// Most bytes of captured pages that wait in memory.
    pub buffer_bytes: u64,
    /// For pages that are worth compressing.
    pub compression: Compression,
    /// The codec's level.
    pub level: i32,
    /// Where the content of pages is looked for before they are stored.
    pub dedup: Dedup,
    /// Where pages go that are written while the bulk pass runs, and that the
    /// buffer has no room for.
    pub dirty: Option<DirtyStoreOptions>,
    /// The session of this process, where it may be made to weigh little while
    /// the guest runs.
    pub session: Option<OwnSession>,
    /// A name for the image.
    pub tag: Option<String>,
    /// How to start the guest again; kept for the restore.
    pub machine: serde_json::Value,
    /// A folder for disk copies on their way to a store that is no folder.
    pub scratch: PathBuf,
}

/// Takes a checkpoint of a running guest into `store`.
///
/// On top of the guest's last image, by comparing, with a pause of at most 50 ms where that can be:
///
/// ```no_run
/// use dewar_checkpoint::{
///     Base, CheckpointError, CheckpointOptions, CheckpointOutcome, Observer, Step, checkpoint,
/// };
/// use dewar_codec::{Codec, Compression};
/// use dewar_guest::Guest;
/// use dewar_image::{Dedup, Store};
/// use std::time::Duration;
///
/// struct Silent;
/// impl Observer for Silent {
///     fn step(&self, _: Step) {}
///     fn progress(&self, _: u64, _: u64) {}
/// }
///
/// fn save(guest: &mut dyn Guest, store: &Store) -> Result<CheckpointOutcome, CheckpointError> {
///     let last = store.open_image(&store.find(guest.name())?)?;
///     let options = CheckpointOptions {
///         base: Base::Compared(&last),
///         known_tracker: None,
///         max_pause: Duration::from_millis(50),
///         buffer_bytes: 256 << 20,
///         compression: Compression::Only(Codec::Zstd),
///         level: 1,
///         dedup: Dedup::Off,
///         dirty: None,
///         session: None,
///         tag: Some("nightly".to_owned()),
///         machine: serde_json::Value::Null,
///         scratch: "/var/tmp".into(),
///     };
///     checkpoint(guest, store, options, &Silent)
/// }
/// ```
///
/// # Errors
/// Where anything fails; the guest was put back as it was (ask its
/// [`Guest::health`]) and the image does not exist.
pub fn checkpoint<'s>(
    guest: &mut dyn Guest,
    store: &'s Store,
    options: CheckpointOptions<'s>,
    observer: &dyn Observer,
) -> Result<CheckpointOutcome, CheckpointError> {
    capture(guest, store, options, observer).map_err(|error| {
        // A failure to put it back shows in the guest's health.
        let _ = guest.rollback();
        match guest.health() {
            // Whatever failed, this is why.
            Health::Gone | Health::ShutDown => CheckpointError::Guest(GuestError::Ended {
                guest: guest.name().to_owned(),
                operation: "it was captured".to_owned(),
            }),
            _ => error,
        }
    })
}

fn capture<'s>(
    guest: &mut dyn Guest,
    store: &'s Store,
    options: CheckpointOptions<'s>,
    observer: &dyn Observer,
) -> Result<CheckpointOutcome, CheckpointError> {
    let began = Instant::now();
    let observer = &Timeline::new(observer, began);
    let ram = guest.ram();
    // An unwritable store is found before the guest is touched.
    let writer = begin_image(store, &options, ram.pages())?;
    let allowance = Allowance::new(options.dirty.as_ref().map_or(0, |it| it.spread_pages));
    observer.step(Step::Begun);
    guest.prepare(DiskTracking {
        begin: writer.id().0.clone(),
        since: options.base.image().map(|image| image.record().id.0.clone()),
    })?;
    observer.step(Step::Capture(CaptureStep::Prepared));
    let (tracker, by_tracking) = track(guest, &ram, &options)?;
    // Asked now: once the image exists nothing may fail any more.
    let identity = tracker.identity()?;
    let (todo, debt) = if by_tracking {
        let lease = tracker.take(cores())?;
        (lease.pages().clone(), Some(lease))
    } else {
        tracker.arm()?;
        (PageSet::full(ram.pages()), None)
    };
    guest.drain()?;
    observer.step(Step::Capture(CaptureStep::Armed));

    writer.expect(&todo);
    let mut epochs = Epochs::new(ram.pages(), began);
    let mut captures = Captures::new(ram.pages(), options.buffer_bytes, debt);
    let (tally, compare) = (Tally::default(), !by_tracking);
    let workers = Workers::new(options.session);
    let ctx = CaptureContext {
        ram: &ram,
        tracker: &tracker,
        writer: &writer,
        workers: &workers,
        allowance: &allowance,
        observer,
    };
    let pass = Pass::new(&ctx, &todo, compare)?;
    match &options.dirty {
        None => pass.run(&ctx, &tally)?,
        Some(it) => {
            let taken = (&mut epochs, &mut captures);
            bulk_with_epochs(taken, guest, &ctx, &pass, it.epoch, &tally)?;
        }
    }
    let mut holes = pass.into_holes();
    observer.step(Step::BulkDone);
    let overflow = Overflow::new(&writer)?;
    let mut sink = EpochSink { captures: &mut captures, ram: &ram, writer: &writer, overflow };
    let reached = |step| observer.step(Step::Capture(step));
    converge(&mut epochs, &mut sink, guest, &tracker, options.max_pause, &reached)?;
    sink.overflow.finish()?;

    let stopped = stop_and_capture(guest, &ctx, &mut epochs, &mut captures, &reached);
    if stopped.is_err() {
        // At once: what follows may wait for a slow store.
        let _ = guest.rollback();
        observer.step(Step::Capture(CaptureStep::PutBack));
    }
    let (device_state, pause) = stopped?;

    holes.subtract(captures.buffer.held());
    if let Some(debt) = &captures.debt {
        holes.subtract(debt.pages());
    }
    // What is unchanged was untouched before, if it was.
    let holes = match options.base.image() {
        Some(parent) if by_tracking => parent.record().memory.counts.hole,
        _ => holes.count(),
    };
    let of_guest = GuestState { device_state: &device_state, hottest: &epochs.hottest() };
    let written = behind(guest, &ctx, &captures.buffer, holes, of_guest, &options.scratch)?;

    let summary = Summary {
        stored_bytes: writer.stored_bytes()
            + written.disks.iter().map(|disk| disk.digest.bytes).sum::<u64>(),
        inherited_bytes: 0,
        duplicate_pages: writer.duplicate_pages(),
        pause_ms: pause.as_secs_f64() * 1e3,
        total_ms: began.elapsed().as_secs_f64() * 1e3,
        epochs: epochs.all().iter().map(epoch_record).collect(),
        captured: CaptureCounts {
            bulk: tally.bulk.into_inner(),
            skipped: tally.skipped.into_inner(),
            dirty_store: captures.keyed,
            spread: allowance.spread(),
            stopped: captures.stopped,
            overflowed: captures.overflowed,
        },
        stages: observer.stages(),
    };
    let memory = MemoryRecord {
        pages: ram.pages(),
        root: written.root,
        regions: region_records(&ram),
        counts: written.counts,
    };
    let record = Record {
        tag: options.tag,
        created_ms: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_millis() as u64),
        machine: options.machine,
        summary,
        ..Record::new(guest.name(), memory, written.device_state, written.hot_pages)
    };
    let record = writer.commit(record, written.disks)?;
    observer.step(Step::Committed);
    if let Some(debt) = captures.debt {
        debt.commit();
    }
    Ok(CheckpointOutcome { record, tracker: identity, by_tracking })
}

/// Begins an image of so many pages, beside a dirty store where one is given.
fn begin_image<'s>(
    store: &'s Store,
    options: &CheckpointOptions<'s>,
    pages: u64,
) -> Result<ImageWriter<'s>, CheckpointError> {
    let image = ImageOptions {
        pages,
        compression: options.compression,
        level: options.level,
        dedup: options.dedup,
    };
    let mut writer = store.begin(image, options.base.image())?;
    if let Some(dirty) = &options.dirty {
        writer.use_dirty_store(dirty.store.clone())?;
    }
    Ok(writer)
}

fn region_records(ram: &Ram) -> Vec<RegionRecord> {
    let record = |region: &RamRegion| RegionRecord {
        name: region.name.clone(),
        pages: region.pages.count(),
    };
    ram.regions().iter().map(record).collect()
}

/// The guest's tracker, and whether it has tracked since the base's pause.
fn track(
    guest: &mut dyn Guest,
    ram: &Ram,
    options: &CheckpointOptions<'_>,
) -> Result<(WriteTracker, bool), CheckpointError> {
    if let Base::Tracked(_, identity, before) = options.base {
        if let Some(tracker) = WriteTracker::resume(guest.process(), ram, identity)? {
            tracker.count_in(before);
            return Ok((tracker, true));
        }
    }
    let origin = guest.uffd_origin()?;
    Ok((WriteTracker::attach(guest.process(), ram, origin, options.known_tracker)?, false))
}

/// Stops the guest, captures what is left, and lets it run. Returns the device
/// state and how long the guest stood still.
fn stop_and_capture(
    guest: &mut dyn Guest,
    ctx: &CaptureContext<'_, '_>,
    epochs: &mut Epochs,
    captures: &mut Captures<'_>,
    reached: &dyn Fn(CaptureStep),
) -> Result<(Vec<u8>, Duration), CheckpointError> {
    let pause = dewar_capture::stop::<CheckpointError>(guest, ctx.tracker, reached)?;
    epochs.note_stopped(&pause.dirty);
    captures.capture_stopped(&pause.dirty, ctx.ram, ctx.writer)?;
    let stood_still = pause.resume(guest, reached)?;
    Ok((pause.device_state, stood_still))
}

fn epoch_record(epoch: &Epoch) -> EpochRecord {
    EpochRecord { at_ms: epoch.at.as_secs_f64() * 1e3, dirty_pages: epoch.dirty_pages }
}
