//! Spreading: the dirty store takes a part of the pages that stand still, too, so that
//! two stores are written at once.
//!
//! The main store's threads take pieces from the front and the page sender takes them from
//! the end, until the two meet or as many pages were spread as were allowed. A page that is
//! written after it was sent is in a later epoch's set: whatever is spread is in the store
//! before an epoch begins, so that the newer version comes after it ([`crate::beside`]).
//! What waits in the buffer after the pause is spread in the same way; nothing is newer.

use crate::CheckpointError;
use crate::bulk::Capturing;
use crate::work::Pieces;
use dewar_image::KeyedSink;
use dewar_units::PageRange;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

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

    /// Whether nothing is allowed.
    pub(crate) fn is_nothing(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    /// The pages that were spread.
    pub(crate) fn spread(&self) -> u64 {
        self.spread.load(Ordering::Relaxed)
    }

    /// Sets so many aside for whoever asks, or none.
    fn reserve(&self, pages: u64) -> bool {
        let rest = |left: u64| left.checked_sub(pages);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).is_ok()
    }

    /// Gives back what was reserved and not spread.
    fn settle(&self, reserved: u64, spread: u64) {
        self.left.fetch_add(reserved - spread, Ordering::Relaxed);
        self.spread.fetch_add(spread, Ordering::Relaxed);
    }
}

/// Spreads pieces from the end, on idle threads, until then or until none is left or
/// allowed. `start` makes what puts a piece's pages for one thread, and says how many it put.
pub(crate) fn spread<'c, P>(
    at: &Capturing<'c, '_>,
    pieces: &Pieces,
    until: Option<Instant>,
    start: impl Fn() -> Result<P, CheckpointError> + Sync,
) -> Result<(), CheckpointError>
where
    P: FnMut(PageRange, &mut KeyedSink<'c, 'c>) -> Result<u64, CheckpointError>,
{
    let allowance = at.allowance;
    if allowance.is_nothing() {
        return Ok(());
    }
    let in_time = || until.is_none_or(|until| Instant::now() < until);
    at.workers.run_idle(|| {
        let work = || -> Result<(), CheckpointError> {
            let Some(mut sink) = at.writer.keyed_sink()? else { return Ok(()) };
            let mut put = start()?;
            while in_time() && allowance.reserve(pieces.most()) {
                let Some(piece) = pieces.take_last() else {
                    allowance.settle(pieces.most(), 0);
                    break;
                };
                let count = put(piece, &mut sink)?;
                allowance.settle(pieces.most(), count);
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
        let allowance = Allowance::new(1000);
        assert!(allowance.reserve(512));
        assert!(!allowance.reserve(512), "488 are left");
        allowance.settle(512, 24);
        assert!(allowance.reserve(512) && allowance.spread() == 24);
        allowance.settle(512, 512);
        assert!(!allowance.reserve(512), "464 are left");
        assert_eq!(allowance.spread(), 536);
    }
}
