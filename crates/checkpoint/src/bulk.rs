//! The bulk pass: every page that stands still, straight from the guest's
//! memory into the image.

use crate::observe::Observer;
use crate::work::{Pieces, Workers};
use crate::{CheckpointError, buffer::CaptureBuffer, compare::Compared};
use dewar_image::ImageWriter;
use dewar_memory::{Ram, WriteTracker};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Pages that a worker takes at a time: one page-table node.
const PIECE: u64 = 512;
/// The share of all pages below which nobody asks which have memory.
const FEW: u64 = 16;

/// What a bulk pass did, and whether it shall stop.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Pages that it encoded, or found to be as the parent has them.
    pub bulk: AtomicU64,
    /// Pages that it left to the epochs.
    pub skipped: AtomicU64,
    stop: AtomicBool,
}

impl Tally {
    /// Lets the pass end early: what it would do is of no use any more.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// What the stages of a capture work on, and with.
pub(crate) struct Capturing<'c, 't> {
    /// The guest's memory.
    pub ram: &'c Ram,
    /// Where writes to it are recorded.
    pub tracker: &'t WriteTracker,
    /// Where its pages go.
    pub writer: &'c ImageWriter<'c>,
    /// Who wait for nothing and whom nobody waits for.
    pub workers: &'c Workers,
    /// Who is told.
    pub observer: &'c dyn Observer,
}

/// Encodes the pages of `todo` but those written since arming, which are left
/// for the epochs. A page that is written while it is copied is in a later
/// epoch's set, whatever was copied. A page that an epoch beside this claimed
/// is left to it. With `compare`, one that is as the parent
/// has it stays there. Returns the pages that have no memory behind them; one
/// that gets some from now on is dirty.
pub(crate) fn bulk(
    at: &Capturing<'_, '_>,
    todo: &PageSet,
    compare: bool,
    tally: &Tally,
) -> Result<PageSet, CheckpointError> {
    let Capturing { ram, tracker, writer, workers, observer } = *at;
    let all = PageRange::new(0, ram.pages());
    let mut holes = PageSet::new(ram.pages());
    // Of a few pages, all just written, asking would take longer than copying.
    if todo.count() > ram.pages() / FEW {
        holes.insert_range(all);
        for range in ram.data_ranges(all)? {
            holes.remove_range(range);
        }
    }
    for page in todo.iter().filter(|page| holes.contains(*page)) {
        writer.put_holes(PageRange::new(page.0, page.0 + 1));
    }
    let pieces = Pieces::new(all, PIECE);
    let done = AtomicU64::new(0);
    workers.run_idle(|| {
        let work = || -> Result<(), CheckpointError> {
            let mut sink = writer.yielding_sink()?;
            let mut compared = Compared::new(writer, compare)?;
            let mut bytes = vec![0; PAGE_BYTES];
            while let Some(piece) = pieces.take().filter(|_| !tally.is_stopped()) {
                let mut pages: Vec<PageNumber> = piece
                    .pages()
                    .filter(|page| todo.contains(*page) && !holes.contains(*page))
                    .collect();
                let wanted = pages.len();
                if wanted > 0 {
                    let dirty = tracker.peek(piece)?;
                    let is_dirty = |page| dirty.iter().any(|range| range.contains(page));
                    pages.retain(|page| writer.is_open(*page) && !is_dirty(*page));
                }
                tally.skipped.fetch_add((wanted - pages.len()) as u64, Ordering::Relaxed);
                tally.bulk.fetch_add(pages.len() as u64, Ordering::Relaxed);
                for page in compared.differing(ram, &pages)? {
                    ram.copy_page(page, &mut bytes);
                    sink.put(page, &bytes)?;
                }
                let before = done.fetch_add(piece.count(), Ordering::Relaxed);
                observer.progress(before + piece.count(), all.count());
            }
            sink.finish()?;
            Ok(())
        };
        work().inspect_err(|_| pieces.stop())
    })?;
    Ok(holes)
}

/// Encodes what was captured, while the guest runs.
pub(crate) fn write_behind(
    buffer: &CaptureBuffer,
    at: &Capturing<'_, '_>,
) -> Result<(), CheckpointError> {
    let Capturing { writer, workers, observer, .. } = *at;
    let pages: Vec<PageNumber> = buffer.held().iter().collect();
    let total = pages.len() as u64;
    let pieces = Pieces::new(PageRange::new(0, total), PIECE);
    workers.run_idle(|| {
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
