//! The bulk pass: every page that stands still, straight from the guest's
//! memory into the image.

use crate::capture_context::CaptureContext;
use crate::spread::{may_spread, spread};
use crate::{CheckpointError, buffer::CaptureBuffer, compare::Compared};
use dewar_capture::{PIECE, Pieces, StandingPages};
use dewar_image::KeyedSink;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

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

/// A bulk pass: what it has to do, and what no thread has taken of it yet.
pub(crate) struct Pass<'p> {
    standing: StandingPages<'p>,
    compare: bool,
    /// Dirty stores that did not answer.
    away: Mutex<HashSet<u32>>,
    done: AtomicU64,
}

impl<'p> Pass<'p> {
    /// One over the pages of `todo`; with `compare`, a page that is as the parent has it
    /// stays there.
    pub(crate) fn new(
        ctx: &CaptureContext<'_, '_>,
        todo: &'p PageSet,
        compare: bool,
    ) -> Result<Self, CheckpointError> {
        let standing = StandingPages::new(ctx.ram, todo)?;
        for page in standing.missing() {
            ctx.writer.put_holes(PageRange::new(page.0, page.0 + 1));
        }
        let (away, done) = Default::default();
        Ok(Self { standing, compare, away, done })
    }

    /// Its pages that have no memory behind them; one that gets some from now on is dirty.
    pub(crate) fn into_holes(self) -> PageSet {
        self.standing.into_holes()
    }

    /// Encodes all pages but those written since arming, which are left for the epochs.
    /// A page that is written while it is copied is in a later epoch's set, whatever was
    /// copied. A page that an epoch beside this claimed is left to it.
    pub(crate) fn run(
        &self,
        ctx: &CaptureContext<'_, '_>,
        tally: &Tally,
    ) -> Result<(), CheckpointError> {
        let CaptureContext { ram, writer, workers, .. } = *ctx;
        workers.run_idle(|| {
            let work = || -> Result<(), CheckpointError> {
                let mut sink = writer.yielding_sink()?;
                let mut compared = self.compared(ctx)?;
                let mut bytes = vec![0; PAGE_BYTES];
                while let Some(piece) =
                    self.standing.pieces().take().filter(|_| !tally.is_stopped())
                {
                    let pages = self.standing_still(ctx, piece, tally)?;
                    tally.bulk.fetch_add(pages.len() as u64, Ordering::Relaxed);
                    for page in compared.differing(ram, &pages)? {
                        ram.copy_page(page, &mut bytes);
                        sink.put(page, &bytes)?;
                    }
                    self.report(ctx, piece);
                }
                sink.finish()?;
                Ok(())
            };
            work().inspect_err(|_| self.standing.pieces().stop())
        })
    }

    /// Whether there is something to spread, and more may be.
    pub(crate) fn may_spread(&self, ctx: &CaptureContext<'_, '_>) -> bool {
        may_spread(ctx, self.standing.pieces())
    }

    /// Spreads pages that stand still until then ([`spread`]). No epoch may run meanwhile.
    pub(crate) fn spread(
        &self,
        ctx: &CaptureContext<'_, '_>,
        tally: &Tally,
        until: Instant,
    ) -> Result<(), CheckpointError> {
        spread(ctx, self.standing.pieces(), Some(until), || {
            let mut compared = self.compared(ctx)?;
            let mut bytes = vec![0; PAGE_BYTES];
            Ok(move |piece: PageRange, sink: &mut KeyedSink<'_, '_>| {
                let pages = self.standing_still(ctx, piece, tally)?;
                let mut sent = 0;
                for page in compared.differing(ctx.ram, &pages)? {
                    ctx.ram.copy_page(page, &mut bytes);
                    sent += u64::from(sink.put(page, &bytes)?);
                }
                tally.bulk.fetch_add(pages.len() as u64 - sent, Ordering::Relaxed);
                self.report(ctx, piece);
                Ok(sent)
            })
        })
    }

    fn compared<'c>(
        &'c self,
        ctx: &CaptureContext<'c, '_>,
    ) -> Result<Compared<'c, 'c>, CheckpointError> {
        Compared::new(ctx.writer, self.compare, &self.away)
    }

    /// The pages of a piece that were not written since arming, nor claimed.
    fn standing_still(
        &self,
        ctx: &CaptureContext<'_, '_>,
        piece: PageRange,
        tally: &Tally,
    ) -> Result<Vec<PageNumber>, CheckpointError> {
        let is_open = |page| ctx.writer.is_open(page);
        let (pages, left) = self.standing.of(piece, ctx.tracker, is_open)?;
        tally.skipped.fetch_add(left, Ordering::Relaxed);
        Ok(pages)
    }

    fn report(&self, ctx: &CaptureContext<'_, '_>, piece: PageRange) {
        let before = self.done.fetch_add(piece.count(), Ordering::Relaxed);
        ctx.observer.progress(before + piece.count(), ctx.ram.pages());
    }
}

/// Encodes what was captured, while the guest runs; the dirty store takes a part of it where
/// that is allowed.
pub(crate) fn write_behind(
    buffer: &CaptureBuffer,
    ctx: &CaptureContext<'_, '_>,
) -> Result<(), CheckpointError> {
    let CaptureContext { writer, workers, observer, .. } = *ctx;
    let pages: Vec<PageNumber> = buffer.held().iter().collect();
    let total = pages.len() as u64;
    let pieces = Pieces::new(PageRange::new(0, total), PIECE);
    let of = |piece: PageRange| &pages[piece.start.index()..piece.end.index()];
    let done = AtomicU64::new(0);
    let report = |piece: PageRange| {
        let before = done.fetch_add(piece.count(), Ordering::Relaxed);
        observer.progress(before + piece.count(), total);
    };
    let narrowly = may_spread(ctx, &pieces).then(|| writer.narrowly());
    std::thread::scope(|scope| {
        let spreads = narrowly.map(|narrowly| {
            scope.spawn(|| {
                let _narrowly = narrowly;
                spread(ctx, &pieces, None, || {
                    Ok(|piece: PageRange, sink: &mut KeyedSink<'_, '_>| {
                        let mut sent = 0;
                        for page in of(piece) {
                            sent += u64::from(sink.put(*page, buffer.page(*page))?);
                        }
                        report(piece);
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
                    report(piece);
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
