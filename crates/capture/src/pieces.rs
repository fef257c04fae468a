//! Pages that several threads share out among them.

use dewar_units::PageRange;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Hands out a range in pieces, from both ends; each to one thread.
///
/// The range may be dealt out as several *stripes*, a piece of each in turn. What is in a guest's memory
/// lies together: pages that compress well here, pages that do not there. Taken from front to back, the
/// first would keep the cores busy while the store waits, and the others the store while the cores wait.
#[derive(Debug)]
pub struct Pieces {
    left: Mutex<Left>,
    most: u64,
}

/// What no thread has taken yet.
#[derive(Debug)]
struct Left {
    stripes: Vec<PageRange>,
    /// The stripe of the next piece from the front, if there is something left of it.
    next: usize,
}

impl Pieces {
    /// Pieces of `most` pages, the last perhaps of fewer.
    pub fn new(all: PageRange, most: u64) -> Self {
        Self::striped(all, most, 1)
    }

    /// The same, of so many stripes of whole pieces, or of fewer.
    pub fn striped(all: PageRange, most: u64, stripes: u64) -> Self {
        let pieces = all.count().div_ceil(most);
        let stripe = pieces.div_ceil(stripes.max(1)).max(1) * most;
        let left = Left { stripes: all.pieces(stripe).collect(), next: 0 };
        Self { left: Mutex::new(left), most }
    }

    /// Whether all were taken.
    pub fn is_empty(&self) -> bool {
        self.left().stripes.iter().all(PageRange::is_empty)
    }

    /// The first that is left of a stripe.
    pub fn take(&self) -> Option<PageRange> {
        let mut left = self.left();
        let count = left.stripes.len();
        let mut order = (0..count).map(|offset| (left.next + offset) % count);
        let index = order.find(|index| !left.stripes[*index].is_empty())?;
        left.next = index + 1;
        let stripe = &mut left.stripes[index];
        let start = stripe.start.0;
        let piece = PageRange::new(start, start + self.most).intersect(stripe);
        stripe.start = piece.end;
        Some(piece)
    }

    /// A piece of at most so many pages from the end; none lies across the border of two
    /// pieces from the front where these are multiples of it.
    pub fn take_last(&self, most: u64) -> Option<PageRange> {
        let mut left = self.left();
        let stripe = left.stripes.iter_mut().rfind(|stripe| !stripe.is_empty())?;
        let odd = stripe.count() % most;
        let count = if odd == 0 { most } else { odd };
        let from = stripe.end.0.saturating_sub(count);
        let piece = PageRange::new(from, stripe.end.0).intersect(stripe);
        stripe.end = piece.start;
        Some(piece)
    }

    /// Makes every later [`Pieces::take`] answer `None`.
    pub fn stop(&self) {
        self.left().stripes.clear();
    }

    fn left(&self) -> MutexGuard<'_, Left> {
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

    #[test]
    fn stripes_take_turns_and_each_page_is_handed_out_once() {
        let starts = |pieces: &Pieces| -> Vec<u64> {
            std::iter::from_fn(|| pieces.take()).map(|piece| piece.start.0).collect()
        };
        let all = PageRange::new(0, 60);
        assert_eq!(starts(&Pieces::striped(all, 10, 3)), [0, 20, 40, 10, 30, 50]);
        assert_eq!(starts(&Pieces::striped(all, 10, 1)), [0, 10, 20, 30, 40, 50]);
        // More stripes than pieces; none at all.
        assert_eq!(starts(&Pieces::striped(all, 25, 16)), [0, 25, 50]);
        assert_eq!(starts(&Pieces::striped(PageRange::new(0, 0), 10, 3)), []);
        let pieces = Pieces::striped(all, 10, 2);
        assert_eq!(pieces.take(), Some(PageRange::new(0, 10)));
        let mut last = std::iter::from_fn(|| pieces.take_last(5));
        let pages: u64 = last.by_ref().map(|piece| piece.count()).sum();
        assert_eq!((pages, pieces.is_empty(), pieces.take()), (50, true, None));
    }
}
