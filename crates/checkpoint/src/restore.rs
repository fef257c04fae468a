//! Bringing a guest's memory back.

mod serve;

use crate::CheckpointError;
use crate::frames::grouped;
use crate::observe::Observer;
use crate::work::{Pieces, cores};
use dewar_image::{Entry, FrameCache, ImageReader};
use dewar_memory::NewRam;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::fs::File;

pub use serve::{PageServer, PageTable, ServeEnd, ServeProgress};

/// Pages that a worker takes at a time.
const PIECE: u64 = 4096;

/// Eager restore: writes all of an image's memory into new RAM files, one for
/// each region, before any guest maps them. Pages of zeros stay holes.
///
/// # Errors
/// Where a page cannot be read back exactly, or a file cannot be written; the
/// files must not be used then.
pub fn fill_files(
    image: &ImageReader,
    files: Vec<File>,
    observer: &dyn Observer,
) -> Result<(), CheckpointError> {
    let memory = &image.record().memory;
    let entries = image.entries()?;
    let mut first = 0;
    for (region, file) in memory.regions.iter().zip(files) {
        let range = PageRange::new(first, first + region.pages);
        let ram = NewRam::new(file, region.pages * PAGE_BYTES as u64)?;
        fill_file(image, &entries, range, &ram, observer)?;
        first = range.end.0;
    }
    Ok(())
}

fn fill_file(
    image: &ImageReader,
    entries: &[Entry],
    range: PageRange,
    ram: &NewRam,
    observer: &dyn Observer,
) -> Result<(), CheckpointError> {
    let pieces = Pieces::new(range, PIECE);
    let work = || -> Result<(), CheckpointError> {
        let mut cache = FrameCache::new()?;
        while let Some(piece) = pieces.take() {
            for group in grouped(entries, piece.pages())? {
                group.read_ahead(image);
                let frame = group.read(image, &mut cache)?;
                for run in group.runs() {
                    let bytes = run.gather(frame)?;
                    let at = (run.first().0 - range.start.0) * PAGE_BYTES as u64;
                    ram.write_at(&bytes, at)?;
                }
            }
            observer.progress(piece.end.0, entries.len() as u64);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let stop_on_error = || work().inspect_err(|_| pieces.stop());
        let workers: Vec<_> = (0..cores()).map(|_| scope.spawn(stop_on_error)).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .fold(Ok(()), Result::and)
    })
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
        .map(|word| PageNumber(word.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte))))
        .filter(|page| page.0 < pages)
        .collect())
}
