//! The bulk pass: every page that stands still, straight from the guest's
//! memory into the image.

use crate::capture_context::CaptureContext;
use crate::spread::{may_spread, spread};
use crate::work::Pieces;
use crate::{CheckpointError, buffer::CaptureBuffer, compare::Compared};
use dewar_image::KeyedSink;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

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

/// A bulk pass: what it has to do, and what nobody has taken of it yet.
pub(crate) struct Pass<'p> {
    todo: &'p PageSet,
    /// The pages that have no memory behind them.
    holes: PageSet,
    compare: bool,
    /// Dirty stores that did not answer.
    away: Mutex<HashSet<u32>>,
    pieces: Pieces,
    done: AtomicU64,
}

impl<'p> Pass<'p> {
    /// One over the pages of `todo`; with `compare`, a page that is as the parent has it
    /// stays there.
    pub(crate) fn new(
        at: &CaptureContext<'_, '_>,
        todo: &'p PageSet,
        compare: bool,
    ) -> Result<Self, CheckpointError> {
        let all = PageRange::new(0, at.ram.pages());
        let mut holes = PageSet::new(at.ram.pages());
        // Of a few pages, all just written, asking would take longer than copying.
        if todo.count() > at.ram.pages() / FEW {
            holes.insert_range(all);
            for range in at.ram.data_ranges(all)? {
                holes.remove_range(range);
            }
        }
        for page in todo.iter().filter(|page| holes.contains(*page)) {
            at.writer.put_holes(PageRange::new(page.0, page.0 + 1));
        }
        let pieces = Pieces::new(all, PIECE);
        let (away, done) = Default::default();
        Ok(Self { todo, holes, compare, away, pieces, done })
    }

    /// Its pages that have no memory behind them; one that gets some from now on is dirty.
    pub(crate) fn into_holes(self) -> PageSet {
        self.holes
    }

    /// Encodes all pages but those written since arming, which are left for the epochs.
    /// A page that is written while it is copied is in a later epoch's set, whatever was
    /// copied. A page that an epoch beside this claimed is left to it.
    pub(crate) fn run(
        &self,
        at: &CaptureContext<'_, '_>,
        tally: &Tally,
    ) -> Result<(), CheckpointError> {
        let CaptureContext { ram, writer, workers, .. } = *at;
        workers.run_idle(|| {
            let work = || -> Result<(), CheckpointError> {
                let mut sink = writer.yielding_sink()?;
                let mut compared = self.compared(at)?;
                let mut bytes = vec![0; PAGE_BYTES];
                while let Some(piece) = self.pieces.take().filter(|_| !tally.is_stopped()) {
                    let pages = self.standing_still(at, piece, tally)?;
                    tally.bulk.fetch_add(pages.len() as u64, Ordering::Relaxed);
                    for page in compared.differing(ram, &pages)? {
                        ram.copy_page(page, &mut bytes);
                        sink.put(page, &bytes)?;
                    }
                    self.tell(at, piece);
                }
                sink.finish()?;
                Ok(())
            };
            work().inspect_err(|_| self.pieces.stop())
        })
    }

    /// Whether there is something to spread, and more may be.
    pub(crate) fn may_spread(&self, at: &CaptureContext<'_, '_>) -> bool {
        may_spread(at, &self.pieces)
    }

    /// Spreads pages that stand still until then ([`spread`]). No epoch may run meanwhile.
    pub(crate) fn spread(
        &self,
        at: &CaptureContext<'_, '_>,
        tally: &Tally,
        until: Instant,
    ) -> Result<(), CheckpointError> {
        spread(at, &self.pieces, Some(until), || {
            let mut compared = self.compared(at)?;
            let mut bytes = vec![0; PAGE_BYTES];
            Ok(move |piece: PageRange, sink: &mut KeyedSink<'_, '_>| {
                let pages = self.standing_still(at, piece, tally)?;
                let mut sent = 0;
                for page in compared.differing(at.ram, &pages)? {
                    at.ram.copy_page(page, &mut bytes);
                    sent += u64::from(sink.put(page, &bytes)?);
                }
                tally.bulk.fetch_add(pages.len() as u64 - sent, Ordering::Relaxed);
                self.tell(at, piece);
                Ok(sent)
            })
        })
    }

    fn compared<'c>(
        &'c self,
        at: &CaptureContext<'c, '_>,
    ) -> Result<Compared<'c, 'c>, CheckpointError> {
        Compared::new(at.writer, self.compare, &self.away)
    }

    /// The pages of a piece that were not written since arming, nor claimed.
    fn standing_still(
        &self,
        at: &CaptureContext<'_, '_>,
        piece: PageRange,
        tally: &Tally,
    ) -> Result<Vec<PageNumber>, CheckpointError> {
        let is_wanted =
            |page: &PageNumber| self.todo.contains(*page) && !self.holes.contains(*page);
        let mut pages: Vec<PageNumber> = piece.pages().filter(is_wanted).collect();
        let wanted = pages.len();
        if wanted > 0 {
            let dirty = at.tracker.peek(piece)?;
            let is_dirty = |page| dirty.iter().any(|range| range.contains(page));
            pages.retain(|page| at.writer.is_open(*page) && !is_dirty(*page));
        }
        tally.skipped.fetch_add((wanted - pages.len()) as u64, Ordering::Relaxed);
        Ok(pages)
    }

    fn tell(&self, at: &CaptureContext<'_, '_>, piece: PageRange) {
        let before = self.done.fetch_add(piece.count(), Ordering::Relaxed);
        at.observer.progress(before + piece.count(), at.ram.pages());
    }
}

/// Encodes what was captured, while the guest runs; the dirty store takes a part of it where
/// that is allowed.
pub(crate) fn write_behind(
    buffer: &CaptureBuffer,
    at: &CaptureContext<'_, '_>,
) -> Result<(), CheckpointError> {
    let CaptureContext { writer, workers, observer, .. } = *at;
    let pages: Vec<PageNumber> = buffer.held().iter().collect();
    let total = pages.len() as u64;
    let pieces = Pieces::new(PageRange::new(0, total), PIECE);
    let of = |piece: PageRange| &pages[piece.start.index()..piece.end.index()];
    let done = AtomicU64::new(0);
    let tell = |piece: PageRange| {
        let before = done.fetch_add(piece.count(), Ordering::Relaxed);
        observer.progress(before + piece.count(), total);
    };
    let narrowly = may_spread(at, &pieces).then(|| writer.narrowly());
    std::thread::scope(|scope| {
        let spreads = narrowly.map(|narrowly| {
            scope.spawn(|| {
                let _narrowly = narrowly;
                spread(at, &pieces, None, || {
                    Ok(|piece: PageRange, sink: &mut KeyedSink<'_, '_>| {
                        let mut sent = 0;
                        for page in of(piece) {
                            sent += u64::from(sink.put(*page, buffer.page(*page))?);
                        }
                        tell(piece);
                        Ok(sent)
                    })
                })
            })
        });
        let encoded = workers.run_idle(|| {
            let work = || -> Result<(), CheckpointError> {
                let mut sink = writer.sink()?;
                while let Some(piece) = pieces.take() {
                    for page in of(piece) {
                        sink.put(*page, buffer.page(*page))?;
                    }
                    tell(piece);
                }
                sink.finish()?;
                Ok(())
            };
            work().inspect_err(|_| pieces.stop())
        });
        let spread = spreads.map_or(Ok(()), |thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        encoded.and(spread)
    })
}
