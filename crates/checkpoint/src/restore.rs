//! Bringing a guest's memory back.

mod crashed_ram;
mod pending_pages;
mod serve;
mod unavailable_stores;

use crate::CheckpointError;
use crate::frames::grouped;
use crate::observe::Observer;
use dewar_capture::Pieces;
use dewar_image::{Entry, FrameCache, ImageReader};
use dewar_memory::NewRam;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

pub use crashed_ram::CrashedRam;
pub use serve::{PageServer, PageTable, ServeEnd, ServeProgress};

/// Pages that a worker takes at a time.
const PIECE: u64 = 4096;

/// Eager restore: writes all of an image's memory into new RAM files, one for
/// each region, before any guest maps them. Pages of zeros stay holes; those that
/// lie in `dead` are taken from there. Returns how many these were.
///
/// # Errors
/// Where a page cannot be read back exactly, or a file cannot be written; the
/// files must not be used then.
pub fn fill_files(
    image: &ImageReader,
    files: Vec<File>,
    dead: &CrashedRam,
    observer: &dyn Observer,
) -> Result<u64, CheckpointError> {
    let memory = &image.record().memory;
    let entries = image.entries()?;
    let (mut first, mut reused) = (0, 0);
    for (region, file) in memory.regions.iter().zip(files) {
        let range = PageRange::new(first, first + region.pages);
        let ram = NewRam::new(file, region.pages * PAGE_BYTES as u64)?;
        reused += fill_file(image, &entries, range, &ram, dead, observer)?;
        first = range.end.0;
    }
    Ok(reused)
}

fn fill_file(
    image: &ImageReader,
    entries: &[Entry],
    range: PageRange,
    ram: &NewRam,
    dead: &CrashedRam,
    observer: &dyn Observer,
) -> Result<u64, CheckpointError> {
    let pieces = Pieces::new(range, PIECE);
    let offset = |page: PageNumber| (page.0 - range.start.0) * PAGE_BYTES as u64;
    let reused = AtomicU64::new(0);
    let work = || -> Result<(), CheckpointError> {
        let mut cache = FrameCache::new()?;
        while let Some(piece) = pieces.take() {
            let (kept, others) = dead.part(entries, piece.pages());
            for run in kept {
                ram.write_at(&run.bytes, offset(run.first))?;
                reused.fetch_add(run.pages(), Ordering::Relaxed);
            }
            for group in grouped(entries, others.into_iter())? {
                group.read_ahead(image);
                let frame = group.read(image, &mut cache)?;
                for run in group.runs() {
                    ram.write_at(&run.gather(frame)?, offset(run.first()))?;
                }
            }
            observer.progress(piece.end.0, entries.len() as u64);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let stop_on_error = || work().inspect_err(|_| pieces.stop());
        let workers: Vec<_> = (0..image.readers()).map(|_| scope.spawn(stop_on_error)).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .fold(Ok(()), Result::and)
    })?;
    Ok(reused.into_inner())
}

/// The pages that a guest wrote last before its checkpoint.
///
/// # Errors
/// Where the list is damaged.
pub fn hot_pages(image: &ImageReader) -> Result<Vec<PageNumber>, CheckpointError> {
    let list = image.blob("list of hot pages", &image.record().hot_pages)?;
    let pages = image.record().memory.pages;
    Ok(list
        .chunks_exact(8)
        .map(|word| {
            PageNumber(word.iter().rev().fold(0, |all, &byte| (all << 8) | u64::from(byte)))
        })
        .filter(|page| page.0 < pages)
        .collect())
}
