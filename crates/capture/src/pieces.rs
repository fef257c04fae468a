//! Pages that several threads share out among them.

use dewar_units::PageRange;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Hands out a range in pieces, from both ends; each to one thread.
#[derive(Debug)]
pub struct Pieces {
    left: Mutex<PageRange>,
    most: u64,
}

impl Pieces {
    /// Pieces of `most` pages, the last perhaps of fewer.
    pub fn new(all: PageRange, most: u64) -> Self {
        Self { left: Mutex::new(all), most }
    }

    /// Whether all were taken.
    pub fn is_empty(&self) -> bool {
        self.left().is_empty()
    }

    /// The first of those left.
    pub fn take(&self) -> Option<PageRange> {
        let mut left = self.left();
        let piece = PageRange::new(left.start.0, left.start.0 + self.most).intersect(&left);
        left.start = piece.end.max(left.start);
        (!piece.is_empty()).then_some(piece)
    }

    /// A piece of at most so many pages from the end; none lies across the border of two
    /// pieces from the front where these are multiples of it.
    pub fn take_last(&self, most: u64) -> Option<PageRange> {
        let mut left = self.left();
        let odd = left.count() % most;
        let count = if odd == 0 { most } else { odd };
        let from = left.end.0.saturating_sub(count);
        let piece = PageRange::new(from, left.end.0).intersect(&left);
        left.end = piece.start.min(left.end);
        (!piece.is_empty()).then_some(piece)
    }

    /// Makes every later [`Pieces::take`] answer `None`.
    pub fn stop(&self) {
        let mut left = self.left();
        left.start = left.end;
    }

    fn left(&self) -> MutexGuard<'_, PageRange> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_taken_from_both_ends_until_they_meet() {
        let pieces = Pieces::new(PageRange::new(0, 1300), 512);
        assert_eq!(pieces.take_last(128), Some(PageRange::new(1280, 1300)));
        assert_eq!(pieces.take(), Some(PageRange::new(0, 512)));
        assert_eq!(pieces.take_last(128), Some(PageRange::new(1152, 1280)));
        assert_eq!(pieces.take(), Some(PageRange::new(512, 1024)));
        assert!(!pieces.is_empty());
        assert_eq!(pieces.take(), Some(PageRange::new(1024, 1152)));
        assert_eq!((pieces.take(), pieces.take_last(128), pieces.is_empty()), (None, None, true));
        let pieces = Pieces::new(PageRange::new(0, 1300), 512);
        pieces.stop();
        assert_eq!((pieces.take(), pieces.take_last(128), pieces.is_empty()), (None, None, true));
    }
}
