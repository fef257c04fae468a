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
use crate::bulk::{Pass, Tally, write_behind};
use crate::capture_context::CaptureContext;
use crate::captures::{Captures, EpochSink};
use crate::observe::{Observer, Step, Timeline};
use crate::overflow::Overflow;
use crate::page_sender::bulk_with_epochs;
use dewar_capture::{CaptureStep, Epoch, Epochs, Workers, converge, cores};
use dewar_codec::Compression;
use dewar_guest::{DiskCopy, DiskInfo, DiskPlace, DiskTracking, Guest, GuestError, Health};
use dewar_image::{
    CaptureCounts, Dedup, DirtyStore, DiskLayer, DiskRecord, EpochRecord, ImageOptions,
    ImageReader, ImageWriter, MemoryRecord, Record, RegionRecord, Store, Summary,
};
use dewar_kernel::OwnSession;
use dewar_memory::{Ram, WriteTracker};
use dewar_units::{PageNumber, PageSet};
use std::path::{Path, PathBuf};
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
    let image = ImageOptions {
        pages: ram.pages(),
        compression: options.compression,
        level: options.level,
        dedup: options.dedup,
    };
    let mut writer = store.begin(image, options.base.image())?;
    if let Some(beside) = &options.dirty {
        writer.use_dirty_store(beside.store.clone())?;
    }
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
    let (memory, copies) = std::thread::scope(|scope| {
        let behind = scope.spawn(|| -> Result<_, CheckpointError> {
            write_behind(&captures.buffer, &ctx)?;
            let (root, counts) = writer.finish_memory(holes)?;
            let device_state = writer.put_blob(&device_state)?;
            let hot_pages = writer.put_blob(&hot_list(&epochs.hottest()))?;
            writer.sync()?;
            Ok((root, counts, device_state, hot_pages))
        });
        let copies = copy_disks(guest, &writer, &options.scratch, &workers, observer);
        if copies.is_err() {
            // As above; and its disks' writes may be what filled up where they go.
            let _ = guest.rollback();
        }
        let behind = behind.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        behind.and_then(|memory| Ok((memory, copies?)))
    })?;
    let (root, counts, device_state, hot_pages) = memory;
    observer.step(Step::WrittenBehind);
    let disks = copies
        .into_iter()
        .map(|(copy, below)| disk_record(&writer, copy, below))
        .collect::<Result<Vec<_>, _>>()?;
    observer.step(Step::Synced);

    let regions = ram
        .regions()
        .iter()
        .map(|region| RegionRecord { name: region.name.clone(), pages: region.pages.count() });
    let summary = Summary {
        stored_bytes: writer.stored_bytes()
            + disks.iter().map(|disk| disk.digest.bytes).sum::<u64>(),
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
    let memory = MemoryRecord { pages: ram.pages(), root, regions: regions.collect(), counts };
    let record = Record {
        tag: options.tag,
        created_ms: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_millis() as u64),
        machine: options.machine,
        summary,
        ..Record::new(guest.name(), memory, device_state, hot_pages)
    };
    let record = writer.commit(record, disks)?;
    observer.step(Step::Committed);
    if let Some(debt) = captures.debt {
        debt.commit();
    }
    Ok(CheckpointOutcome { record, tracker: identity, by_tracking })
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

fn copy_disks(
    guest: &mut dyn Guest,
    writer: &ImageWriter<'_>,
    scratch: &Path,
    workers: &Workers,
    observer: &dyn Observer,
) -> Result<Vec<(DiskCopy, Vec<DiskLayer>)>, CheckpointError> {
    let name = guest.name().to_owned();
    let mut below = Vec::new();
    let mut place = |number: usize, disk: &DiskInfo, tracked: bool| {
        let layers = match tracked {
            true => writer.disk_below(&disk.name, disk.virtual_bytes),
            false => Vec::new(),
        };
        let path =
            writer.reserve_disk(number, "qcow2", scratch).map_err(|error| GuestError::Failed {
                operation: "copying a disk".to_owned(),
                guest: name.clone(),
                cause: error.to_string(),
            })?;
        let nearest = layers.first().map(|layer| layer.file.clone());
        below.push(layers);
        Ok(DiskPlace { path, below: nearest })
    };
    let copies = guest.copy_disks(&mut place)?;
    observer.step(Step::DisksCopied);
    // The guest may wait for its disks meanwhile.
    let _awaited = workers.awaited();
    guest.finish()?;
    observer.step(Step::DisksCurrent);
    Ok(copies.into_iter().zip(below).collect())
}

fn disk_record(
    writer: &ImageWriter<'_>,
    copy: DiskCopy,
    below: Vec<DiskLayer>,
) -> Result<DiskRecord, CheckpointError> {
    let digest = writer.put_disk(&copy.path)?;
    let file = copy.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(DiskRecord {
        name: copy.disk.name,
        file,
        format: copy.format,
        virtual_bytes: copy.disk.virtual_bytes,
        digest,
        below,
    })
}

fn epoch_record(epoch: &Epoch) -> EpochRecord {
    EpochRecord { at_ms: epoch.at.as_secs_f64() * 1e3, dirty_pages: epoch.dirty_pages }
}

/// Page numbers as little-endian 64-bit words.
fn hot_list(pages: &[PageNumber]) -> Vec<u8> {
    pages.iter().flat_map(|page| page.0.to_le_bytes()).collect()
}
