//! What a server has still to bring.

use dewar_units::{PageNumber, PageRange, PageSet};

/// The pages that have not arrived.
pub(super) struct Missing {
    pub(super) pages: PageSet,
    /// How many they are: asked at every touch.
    pub(super) left: u64,
}

impl Missing {
    pub(super) fn contains(&self, page: PageNumber) -> bool {
        self.pages.contains(page)
    }

    /// Those of a range, as runs.
    pub(super) fn runs_in(&self, range: PageRange) -> Vec<PageRange> {
        self.pages.ranges_in(range).collect()
    }

    /// Notes that a run of missing pages has arrived.
    pub(super) fn arrived(&mut self, run: PageRange) {
        self.pages.remove_range(run);
        self.left -= run.count();
    }
}
