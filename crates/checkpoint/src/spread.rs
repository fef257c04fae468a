//! Spreading: the dirty store takes a part of the pages that stand still, too, so that
//! two stores are written at once.
//!
//! The main store's threads take pieces from the front and the page sender takes them from
//! the end, until the two meet or as many pages were spread as were allowed. A page that is
//! written after it was sent is in a later epoch's set: whatever is spread is in the store
//! before an epoch begins, so that the newer version comes after it ([`crate::page_sender`]).
//! What waits in the buffer after the pause is spread in the same way; nothing is newer.
//! Meanwhile segments go to the main store one by one ([`dewar_image::ImageWriter::narrowly`]):
//! a thread that fills a segment must feel how slow that store is, or the main store's threads
//! would take all the pieces.

use crate::CheckpointError;
use crate::bulk::CaptureContext;
use crate::work::Pieces;
use dewar_image::KeyedSink;
use dewar_units::PageRange;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Pages that a thread spreads at a time: an epoch waits for it.
const PIECE: u64 = 128;

/// How many pages may still be spread, and how many were.
#[derive(Debug)]
pub(crate) struct Allowance {
    left: AtomicU64,
    spread: AtomicU64,
}

impl Allowance {
    pub(crate) fn new(pages: u64) -> Self {
        Self { left: AtomicU64::new(pages), spread: AtomicU64::new(0) }
    }

    /// Whether no more may be spread.
    fn is_used_up(&self) -> bool {
        self.left.load(Ordering::Relaxed) < PIECE
    }

    /// The pages that were spread.
    pub(crate) fn spread(&self) -> u64 {
        self.spread.load(Ordering::Relaxed)
    }

    /// Sets a piece's pages aside for the thread that asks, or none.
    fn reserve(&self) -> bool {
        let rest = |left: u64| left.checked_sub(PIECE);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).is_ok()
    }

    /// Gives back what was reserved and not spread.
    fn settle(&self, spread: u64) {
        self.left.fetch_add(PIECE - spread, Ordering::Relaxed);
        self.spread.fetch_add(spread, Ordering::Relaxed);
    }
}

/// Whether there is something to spread, and more may be.
pub(crate) fn may_spread(at: &CaptureContext<'_, '_>, pieces: &Pieces) -> bool {
    !at.allowance.is_used_up() && !pieces.is_empty()
}

/// Spreads pieces from the end, on idle threads, until then or while
/// [`may_spread`]. `start` makes what puts a piece's pages for one thread, and says how many
/// it put.
pub(crate) fn spread<'c, P>(
    at: &CaptureContext<'c, '_>,
    pieces: &Pieces,
    until: Option<Instant>,
    start: impl Fn() -> Result<P, CheckpointError> + Sync,
) -> Result<(), CheckpointError>
where
    P: FnMut(PageRange, &mut KeyedSink<'c, 'c>) -> Result<u64, CheckpointError>,
{
    let allowance = at.allowance;
    let in_time = || until.is_none_or(|until| Instant::now() < until);
    at.workers.run_idle(|| {
        let work = || -> Result<(), CheckpointError> {
            let Some(mut sink) = at.writer.keyed_sink()? else { return Ok(()) };
            let mut put = start()?;
            while in_time() && allowance.reserve() {
                let Some(piece) = pieces.take_last(PIECE) else {
                    allowance.settle(0);
                    break;
                };
                let count = put(piece, &mut sink)?;
                allowance.settle(count);
            }
            sink.flush()?;
            Ok(())
        };
        work().inspect_err(|_| pieces.stop())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_spread_than_allowed() {
        let allowance = Allowance::new(2 * PIECE - 1);
        assert!(allowance.reserve() && !allowance.reserve(), "too few are left");
        allowance.settle(PIECE - 1);
        assert!(!allowance.is_used_up());
        assert!(allowance.reserve());
        allowance.settle(PIECE);
        assert!(allowance.is_used_up() && !allowance.reserve());
        assert_eq!(allowance.spread(), 2 * PIECE - 1);
    }
}
