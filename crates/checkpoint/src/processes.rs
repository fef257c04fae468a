//! A checkpoint of a guest that is made of processes.
//!
//! ```text
//!  running  1. epochs   copy all memory, then what was written meanwhile, until that is little
//!  stopped  2. stop     the guest is frozen and saved; what was written since is copied
//!  running  3. behind   encode the copy, write the record
//! ```
//!
//! There is a copy of the whole memory. Pages move from one place to another in the
//! copy as processes map and unmap memory: what an earlier checkpoint has is found by content
//! ([`dewar_image::Dedup::Known`]), wherever it is.

use crate::CheckpointError;
use crate::observe::{Observer, Step, Timeline};
use dewar_capture::{CaptureStep, PIECE, Pieces, Workers};
use dewar_codec::Compression;
use dewar_guest::{GuestError, Health, ProcessGuest, SavedFiles, SavedProcesses};
use dewar_image::{
    CaptureCounts, Dedup, DiskRecord, EpochRecord, ImageError, ImageOptions, ImageReader,
    ImageWriter, MemoryRecord, Record, RegionRecord, Store, StoreError, Summary,
};
use dewar_kernel::OwnSession;
use dewar_memory::Ram;
use dewar_units::{PAGE_BYTES, PageRange, PageSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Most epochs; what is left then is copied in the pause.
const MOST_EPOCHS: usize = 8;
/// So many pages are copied in no time.
const FEW: u64 = 128;
/// The format of files in a store.
const ARCHIVE: &str = "tar";

/// How to take a checkpoint of processes.
#[derive(Debug)]
pub struct ProcessCheckpoint<'s> {
    /// The guest's newest checkpoint, in whose pages others are looked for.
    pub base: Option<&'s ImageReader>,
    /// For pages that are worth compressing.
    pub compression: Compression,
    /// The codec's level.
    pub level: i32,
    /// Where the content of pages is looked for before they are stored.
    pub dedup: Dedup,
    /// The session of this process, where it may be made to weigh little.
    pub session: Option<OwnSession>,
    /// A name for the image.
    pub tag: Option<String>,
    /// What the guest is; kept for the restore.
    pub machine: serde_json::Value,
    /// A folder for archives on their way to a store that is no folder.
    pub scratch: PathBuf,
}

/// Takes a checkpoint of a guest that is made of processes into `store`.
///
/// # Errors
/// Where anything fails; the guest runs and the image does not exist.
pub fn checkpoint_processes<'s>(
    guest: &mut dyn ProcessGuest,
    store: &'s Store,
    options: ProcessCheckpoint<'s>,
    observer: &dyn Observer,
) -> Result<Record, CheckpointError> {
    let began = Instant::now();
    let observer = &Timeline::new(observer, began);
    let mut epochs = Vec::new();
    let taken =
        copy_running(guest, began, &mut epochs, observer).and_then(|()| capture(guest, observer));
    let (saved, pause) = taken.map_err(|error| {
        guest.rollback();
        observer.step(Step::Capture(CaptureStep::PutBack));
        match guest.health() {
            Health::Gone => GuestError::Ended {
                guest: guest.name().to_owned(),
                operation: "it was captured".to_owned(),
            },
            _ => error,
        }
    })?;
    let pages = saved.memory.pages();
    let ProcessCheckpoint { compression, level, dedup, .. } = options;
    let image = ImageOptions { pages, compression, level, dedup };
    let writer = store.begin(image, options.base)?;
    // Nothing is where the parent has it unless it is found there.
    writer.expect(&PageSet::full(pages));
    observer.step(Step::Begun);
    let holes = encode(&saved.memory, &writer, &Workers::new(options.session), observer)?;
    let (root, counts) = writer.finish_memory(holes)?;
    let state = writer.put_blob(&saved.state)?;
    let hot_pages = writer.put_blob(&[])?;
    writer.sync()?;
    let files = saved.files.iter().enumerate();
    let disks = files
        .map(|(number, files)| put_files(&writer, number, files, &options.scratch))
        .collect::<Result<Vec<_>, _>>()?;
    observer.step(Step::Synced);
    let regions = saved.memory.regions().iter();
    let regions =
        regions.map(|it| RegionRecord { name: it.name.clone(), pages: it.pages.count() }).collect();
    let summary = Summary {
        stored_bytes: writer.stored_bytes()
            + disks.iter().map(|disk| disk.digest.bytes).sum::<u64>(),
        duplicate_pages: writer.duplicate_pages(),
        pause_ms: pause.as_secs_f64() * 1e3,
        total_ms: began.elapsed().as_secs_f64() * 1e3,
        // Of an epoch there may have been memory that was given back since.
        epochs: epochs
            .iter()
            .map(|it| EpochRecord { dirty_pages: it.dirty_pages.min(pages), ..*it })
            .collect(),
        captured: CaptureCounts { stopped: saved.stopped_pages, ..CaptureCounts::default() },
        stages: observer.stages(),
        ..Summary::default()
    };
    let memory = MemoryRecord { pages, root, regions, counts };
    let record = Record {
        tag: options.tag,
        created_ms: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_millis() as u64),
        machine: options.machine,
        summary,
        ..Record::new(guest.name(), memory, state, hot_pages)
    };
    let record = writer.commit(record, disks)?;
    observer.step(Step::Committed);
    Ok(record)
}

/// Copies the memory while the guest runs, until little is written from one epoch to the next.
fn copy_running(
    guest: &mut dyn ProcessGuest,
    began: Instant,
    epochs: &mut Vec<EpochRecord>,
    observer: &dyn Observer,
) -> Result<(), GuestError> {
    let mut before = u64::MAX;
    while epochs.len() < MOST_EPOCHS {
        let at_ms = began.elapsed().as_secs_f64() * 1e3;
        let Some(dirty_pages) = guest.copy_running()? else { break };
        epochs.push(EpochRecord { at_ms, dirty_pages });
        let number = epochs.len();
        observer.step(Step::Capture(CaptureStep::Epoch { number, dirty_pages, pause: None }));
        // In the pause it is not more than in an epoch that is hardly shorter.
        if dirty_pages <= FEW || dirty_pages > before / 4 * 3 {
            break;
        }
        before = dirty_pages;
    }
    Ok(())
}

/// Puts an archive of files where the store has copies of disks.
fn put_files(
    writer: &ImageWriter<'_>,
    number: usize,
    files: &SavedFiles,
    scratch: &Path,
) -> Result<DiskRecord, CheckpointError> {
    let place = writer.reserve_disk(number, ARCHIVE, scratch)?;
    let copied = fs::copy(&files.archive, &place).and_then(|bytes| {
        File::open(&place)?.sync_all()?;
        Ok(bytes)
    });
    let bytes = copied.map_err(StoreError::io("write", &place)).map_err(ImageError::from)?;
    let digest = writer.put_disk(&place)?;
    Ok(DiskRecord {
        name: files.name.clone(),
        file: place.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        format: ARCHIVE.to_owned(),
        virtual_bytes: bytes,
        digest,
        below: Vec::new(),
    })
}

/// Stops the guest and lets it run; returns what it was in between, and how long it stood still.
fn capture(
    guest: &mut dyn ProcessGuest,
    observer: &dyn Observer,
) -> Result<(SavedProcesses, Duration), GuestError> {
    let reached = |step| observer.step(Step::Capture(step));
    reached(CaptureStep::Stopping);
    let stopped = guest.stop()?;
    reached(CaptureStep::Captured);
    guest.resume()?;
    let pause = stopped.elapsed();
    reached(CaptureStep::Resumed);
    Ok((guest.saved()?, pause))
}

/// Encodes all pages on idle workers. Returns how many of them have nothing behind them.
fn encode(
    memory: &Ram,
    writer: &ImageWriter<'_>,
    workers: &Workers,
    observer: &dyn Observer,
) -> Result<u64, CheckpointError> {
    let all = PageRange::new(0, memory.pages());
    let pieces = Pieces::new(all, PIECE);
    let (done, encoded) = (AtomicU64::new(0), AtomicU64::new(0));
    workers.run_idle(|| {
        let work = || -> Result<(), CheckpointError> {
            let mut sink = writer.sink()?;
            let mut bytes = vec![0; PAGE_BYTES];
            while let Some(piece) = pieces.take() {
                let data = memory.data_ranges(piece)?;
                for page in data.iter().flat_map(PageRange::pages) {
                    memory.copy_page(page, &mut bytes);
                    sink.put(page, &bytes)?;
                }
                encoded.fetch_add(data.iter().map(PageRange::count).sum(), Ordering::Relaxed);
                // What was put is not open any more.
                sink.flush()?;
                writer.put_holes(piece);
                let before = done.fetch_add(piece.count(), Ordering::Relaxed);
                observer.progress(before + piece.count(), all.count());
            }
            sink.finish()?;
            Ok(())
        };
        work().inspect_err(|_| pieces.stop())
    })?;
    Ok(all.count() - encoded.into_inner())
}
