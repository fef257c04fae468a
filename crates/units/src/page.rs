use std::fmt;

/// Bytes in a page. Dewar counts in 4 KiB pages everywhere, whatever the size
/// of the pages that back the guest.
pub const PAGE_BYTES: usize = 4096;

/// The number of a page, counted from the start of a guest's RAM (all regions
/// one after the other) unless a function says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageNumber(pub u64);

impl PageNumber {
    /// The byte offset of the page's first byte.
    pub const fn byte_offset(self) -> u64 {
        self.0 * PAGE_BYTES as u64
    }

    /// The page that holds byte `offset`.
    pub const fn containing(offset: u64) -> Self {
        Self(offset / PAGE_BYTES as u64)
    }

    /// As an index into a table with one entry a page.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for PageNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Pages from `start` up to, not including, `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PageRange {
    /// The first page.
    pub start: PageNumber,
    /// The page after the last.
    pub end: PageNumber,
}

impl PageRange {
    /// The range `start..end`; empty where `end <= start`.
    pub const fn new(start: u64, end: u64) -> Self {
        Self { start: PageNumber(start), end: PageNumber(end) }
    }

    /// How many pages it has.
    pub const fn count(&self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// Whether it has no page.
    pub const fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// The pages, in order.
    pub fn pages(&self) -> impl Iterator<Item = PageNumber> + use<> {
        (self.start.0..self.end.0).map(PageNumber)
    }

    /// Whether `page` lies in it.
    pub const fn contains(&self, page: PageNumber) -> bool {
        self.start.0 <= page.0 && page.0 < self.end.0
    }

    /// The pages that lie in both.
    pub fn intersect(&self, other: &Self) -> Self {
        Self { start: self.start.max(other.start), end: self.end.min(other.end) }
    }

    /// Moves it `pages` up.
    pub const fn shifted(&self, pages: u64) -> Self {
        Self::new(self.start.0 + pages, self.end.0 + pages)
    }

    /// Cuts it into pieces of at most `pages`.
    pub fn pieces(&self, pages: u64) -> impl Iterator<Item = PageRange> + use<> {
        let end = self.end.0;
        (self.start.0..end)
            .step_by(pages.max(1) as usize)
            .map(move |start| PageRange::new(start, end.min(start + pages.max(1))))
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_range_once() {
        let pieces: Vec<_> = PageRange::new(3, 11).pieces(4).collect();
        assert_eq!(pieces, [PageRange::new(3, 7), PageRange::new(7, 11)]);
        assert_eq!(PageRange::new(5, 5).pieces(4).count(), 0);
    }
}
