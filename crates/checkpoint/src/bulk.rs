//! The bulk pass: every page that stands still, straight from the guest's
//! memory into the image.

use crate::observe::Observer;
use crate::work::{Pieces, cores, run_idle};
use crate::{CheckpointError, buffer::CaptureBuffer};
use dewar_image::ImageWriter;
use dewar_memory::{Ram, WriteTracker};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages that a worker takes at a time: one page-table node.
const PIECE: u64 = 512;

/// What the bulk pass found.
pub(crate) struct BulkResult {
    /// Pages that have no memory behind them.
    pub holes: PageSet,
}

/// Encodes every page but those already written since arming, which are left
/// for the epochs. A page that is written while it is copied is in a later
/// epoch's set, whatever was copied.
pub(crate) fn bulk(
    ram: &Ram,
    tracker: &WriteTracker,
    writer: &ImageWriter<'_>,
    observer: &dyn Observer,
) -> Result<BulkResult, CheckpointError> {
    let all = PageRange::new(0, ram.pages());
    let pieces = Pieces::new(all, PIECE);
    let holes = Mutex::new(PageSet::new(ram.pages()));
    let done = AtomicU64::new(0);
    run_idle(cores(), || {
        let work = || -> Result<(), CheckpointError> {
            let mut sink = writer.sink()?;
            let mut page_bytes = vec![0; PAGE_BYTES];
            while let Some(piece) = pieces.take() {
                let still = still_pages(ram, tracker, piece, writer, &holes)?;
                for page in still.iter() {
                    let page = PageNumber(piece.start.0 + page.0);
                    ram.copy_page(page, &mut page_bytes);
                    sink.put(page, &page_bytes)?;
                }
                let before = done.fetch_add(piece.count(), Ordering::Relaxed);
                observer.progress(before + piece.count(), all.count());
            }
            sink.finish()?;
            Ok(())
        };
        work().inspect_err(|_| pieces.stop())
    })?;
    Ok(BulkResult { holes: holes.into_inner().unwrap_or_else(|locked| locked.into_inner()) })
}

/// The pages of a piece (counted from its start) that have memory and were not
/// written since arming. Holes are noted.
fn still_pages(
    ram: &Ram,
    tracker: &WriteTracker,
    piece: PageRange,
    writer: &ImageWriter<'_>,
    holes: &Mutex<PageSet>,
) -> Result<PageSet, CheckpointError> {
    let local = |range: PageRange| {
        PageRange::new(range.start.0 - piece.start.0, range.end.0 - piece.start.0)
    };
    // Data first, then writes: a hole that is filled in between is dirty.
    let mut still = PageSet::new(piece.count());
    for range in ram.data_ranges(piece)? {
        still.insert_range(local(range));
    }
    let mut hollow = PageSet::full(piece.count());
    hollow.subtract(&still);
    if !hollow.is_empty() {
        let mut holes = holes.lock().unwrap_or_else(|locked| locked.into_inner());
        for range in hollow.ranges() {
            let range = range.shifted(piece.start.0);
            writer.put_holes(range);
            holes.insert_range(range);
        }
    }
    for range in tracker.peek(piece)? {
        still.remove_range(local(range));
    }
    Ok(still)
}

/// Encodes what was captured, while the guest runs.
pub(crate) fn write_behind(
    buffer: &CaptureBuffer,
    writer: &ImageWriter<'_>,
    observer: &dyn Observer,
) -> Result<(), CheckpointError> {
    let pages: Vec<PageNumber> = buffer.held().iter().collect();
    let total = pages.len() as u64;
    let pieces = Pieces::new(PageRange::new(0, total), PIECE);
    run_idle(cores(), || {
        let work = || -> Result<(), CheckpointError> {
            let mut sink = writer.sink()?;
            while let Some(piece) = pieces.take() {
                for page in &pages[piece.start.index()..piece.end.index()] {
                    sink.put(*page, buffer.page(*page))?;
                }
                observer.progress(piece.end.0, total);
            }
            sink.finish()?;
            Ok(())
        };
        work().inspect_err(|_| pieces.stop())
    })
}
