//! How many pages that stand still may go to the dirty store, too.

use std::sync::atomic::{AtomicU64, Ordering};

/// Pages that a thread spreads at a time: an epoch waits for it.
pub(crate) const PIECE: u64 = 128;

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
    pub(crate) fn is_used_up(&self) -> bool {
        self.left.load(Ordering::Relaxed) < PIECE
    }

    /// The pages that were spread.
    pub(crate) fn spread(&self) -> u64 {
        self.spread.load(Ordering::Relaxed)
    }

    /// Sets a piece's pages aside for the thread that asks, or none.
    pub(crate) fn reserve(&self) -> bool {
        let rest = |left: u64| left.checked_sub(PIECE);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).is_ok()
    }

    /// Gives back what was reserved and not spread.
    pub(crate) fn free_rest(&self, spread: u64) {
        self.left.fetch_add(PIECE - spread, Ordering::Relaxed);
        self.spread.fetch_add(spread, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_spread_than_allowed() {
        let allowance = Allowance::new(2 * PIECE - 1);
        assert!(allowance.reserve() && !allowance.reserve(), "too few are left");
        allowance.free_rest(PIECE - 1);
        assert!(!allowance.is_used_up());
        assert!(allowance.reserve());
        allowance.free_rest(PIECE);
        assert!(allowance.is_used_up() && !allowance.reserve());
        assert_eq!(allowance.spread(), 2 * PIECE - 1);
    }
}
