//! The epochs of a capture, and the pages that were written last.

use dewar_units::{PageNumber, PageSet};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Epochs whose pages are hot.
const HOT_EPOCHS: usize = 4;
/// Most hot pages: the list is read before the guest runs.
const MOST_HOT: usize = 1 << 16;

/// A set of dirty pages that was taken.
#[derive(Debug, Clone, Copy)]
pub struct Epoch {
    /// When, since the capture began.
    pub at: Duration,
    /// How many pages.
    pub dirty_pages: u64,
}

/// What is known of the epochs of a capture.
#[derive(Debug)]
pub struct Epochs {
    began: Instant,
    last_take: Instant,
    all: Vec<Epoch>,
    /// The pages of the last, those of the pause with the last one's.
    hot: VecDeque<PageSet>,
}

impl Epochs {
    /// None yet, of a guest with so many pages.
    pub fn new(pages: u64, began: Instant) -> Self {
        let hot = VecDeque::from([PageSet::new(pages)]);
        Self { began, last_take: began, all: Vec::new(), hot }
    }

    /// Each epoch so far.
    pub fn all(&self) -> &[Epoch] {
        &self.all
    }

    /// How long before `now` the last one began; or the capture.
    pub(crate) fn since_last(&self, now: Instant) -> Duration {
        now - self.last_take
    }

    /// Notes an epoch that began then. Returns its number, from 1.
    pub fn note(&mut self, began: Instant, dirty_pages: u64) -> usize {
        self.last_take = began;
        self.all.push(Epoch { at: began - self.began, dirty_pages });
        self.all.len()
    }

    /// Notes which pages an epoch found written.
    pub fn note_hot(&mut self, pages: &PageSet) {
        if self.hot.len() == HOT_EPOCHS {
            self.hot.pop_front();
        }
        self.hot.push_back(pages.clone());
    }

    /// Notes which pages the pause found written.
    pub fn note_stopped(&mut self, pages: &PageSet) {
        if let Some(last) = self.hot.back_mut() {
            last.union_with(pages);
        }
    }

    /// The pages that were written last, the last epoch's first.
    pub fn hottest(&self) -> Vec<PageNumber> {
        let mut all = Vec::new();
        for (newer, epoch) in self.hot.iter().rev().enumerate() {
            let mut new = epoch.clone();
            self.hot.iter().rev().take(newer).for_each(|known| new.subtract(known));
            all.extend(new.iter());
        }
        all.truncate(MOST_HOT);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_pages_are_those_of_the_last_epochs_the_newest_first() {
        let mut epochs = Epochs::new(100, Instant::now());
        for pages in [&[90][..], &[50, 60], &[10, 50], &[20], &[10, 30]] {
            let mut set = PageSet::new(100);
            for page in pages {
                set.insert(PageNumber(*page));
            }
            epochs.note_hot(&set);
        }
        let hottest: Vec<u64> = epochs.hottest().iter().map(|page| page.0).collect();
        // 90 is of the fifth last.
        assert_eq!(hottest, [10, 30, 20, 50, 60]);
    }
}
