use crate::{PageNumber, PageRange};

const WORD_BITS: u64 = 64;

/// A set of pages below a fixed bound: one bit a page.
///
/// 1 GiB of RAM takes 32 KiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
    bound: u64,
}

impl PageSet {
    /// The empty set of pages below `bound`.
    pub fn new(bound: u64) -> Self {
        Self { words: vec![0; bound.div_ceil(WORD_BITS) as usize], bound }
    }

    /// The set of all pages below `bound`.
    pub fn full(bound: u64) -> Self {
        let mut set = Self::new(bound);
        set.insert_range(PageRange::new(0, bound));
        set
    }

    /// A bit for each page below the bound, from the lowest bit of the first byte on.
    pub fn to_bytes(&self) -> Vec<u8> {
        let bytes = self.words.iter().flat_map(|word| word.to_le_bytes());
        bytes.take(self.bound.div_ceil(8) as usize).collect()
    }

    /// The set of pages below `bound` that has these [bytes](Self::to_bytes); `None` where none has.
    pub fn from_bytes(bytes: &[u8], bound: u64) -> Option<Self> {
        let mut set = Self::new(bound);
        if bytes.len() as u64 != bound.div_ceil(8) {
            return None;
        }
        for (index, byte) in bytes.iter().enumerate() {
            set.words[index / 8] |= u64::from(*byte) << (index % 8 * 8);
        }
        let beyond = bytes.last().map_or(0, |last| u32::from(*last) >> ((bound - 1) % 8 + 1));
        (beyond == 0).then_some(set)
    }

    /// The number that every page of the set lies below.
    pub fn bound(&self) -> u64 {
        self.bound
    }

    /// Adds a page; says whether it was new.
    ///
    /// # Panics
    /// Where `page` is not below the bound.
    pub fn insert(&mut self, page: PageNumber) -> bool {
        assert!(page.0 < self.bound, "page {page} in a set of {}", self.bound);
        let (word, bit) = place(page);
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        new
    }

    /// Adds every page of `range`.
    ///
    /// # Panics
    /// Where the range reaches over the bound.
    pub fn insert_range(&mut self, range: PageRange) {
        assert!(
            range.is_empty() || range.end.0 <= self.bound,
            "{range} in a set of {}",
            self.bound
        );
        self.for_words(range, |word, mask| *word |= mask);
    }

    /// Takes every page of `range` out.
    pub fn remove_range(&mut self, range: PageRange) {
        let bounded = range.intersect(&PageRange::new(0, self.bound));
        self.for_words(bounded, |word, mask| *word &= !mask);
    }

    /// Takes a page out; says whether it was there.
    pub fn remove(&mut self, page: PageNumber) -> bool {
        if !self.contains(page) {
            return false;
        }
        let (word, bit) = place(page);
        self.words[word] &= !bit;
        true
    }

    /// Whether `page` is in the set.
    pub fn contains(&self, page: PageNumber) -> bool {
        let (word, bit) = place(page);
        page.0 < self.bound && self.words[word] & bit != 0
    }

    /// Adds all of `other`'s pages.
    ///
    /// # Panics
    /// Where the bounds differ.
    pub fn union_with(&mut self, other: &Self) {
        assert_eq!(self.bound, other.bound, "sets of one guest");
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            *mine |= theirs;
        }
    }

    /// Takes all of `other`'s pages out.
    ///
    /// # Panics
    /// Where the bounds differ.
    pub fn subtract(&mut self, other: &Self) {
        assert_eq!(self.bound, other.bound, "sets of one guest");
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            *mine &= !theirs;
        }
    }

    /// How many pages it holds.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Whether it holds no page.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Takes every page out.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// The pages, in order.
    pub fn iter(&self) -> impl Iterator<Item = PageNumber> + '_ {
        self.words.iter().enumerate().flat_map(|(index, &word)| {
            std::iter::successors((word != 0).then_some(word), |&left| {
                let rest = left & (left - 1);
                (rest != 0).then_some(rest)
            })
            .map(move |left| {
                PageNumber(index as u64 * WORD_BITS + u64::from(left.trailing_zeros()))
            })
        })
    }

    /// The longest runs of neighbouring pages, in order.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> + '_ {
        self.ranges_in(PageRange::new(0, self.bound))
    }

    /// The same of the pages in `range` alone.
    pub fn ranges_in(&self, range: PageRange) -> impl Iterator<Item = PageRange> + '_ {
        let (mut next, end) = (range.start.0, range.end.0.min(self.bound));
        std::iter::from_fn(move || {
            let start = self.find(next, true).filter(|start| *start < end)?;
            next = self.find(start, false).map_or(end, |stop| stop.min(end));
            Some(PageRange::new(start, next))
        })
    }

    /// The first page at or after `from` that is in the set (`present`) or not.
    fn find(&self, from: u64, present: bool) -> Option<u64> {
        let mut page = from;
        while page < self.bound {
            let word = self.words[(page / WORD_BITS) as usize];
            let wanted = if present { word } else { !word } & (u64::MAX << (page % WORD_BITS));
            if wanted != 0 {
                let found = page - page % WORD_BITS + u64::from(wanted.trailing_zeros());
                return (found < self.bound).then_some(found);
            }
            page += WORD_BITS - page % WORD_BITS;
        }
        None
    }

    fn for_words(&mut self, range: PageRange, mut change: impl FnMut(&mut u64, u64)) {
        let mut page = range.start.0;
        while page < range.end.0 {
            let first = page % WORD_BITS;
            let take = (WORD_BITS - first).min(range.end.0 - page);
            let mask = (u64::MAX >> (WORD_BITS - take)) << first;
            change(&mut self.words[(page / WORD_BITS) as usize], mask);
            page += take;
        }
    }
}

fn place(page: PageNumber) -> (usize, u64) {
    ((page.0 / WORD_BITS) as usize, 1 << (page.0 % WORD_BITS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_set_is_its_bytes() {
        for bound in [0, 1, 7, 8, 9, 63, 64, 65, 1000] {
            let mut set = PageSet::new(bound);
            (0..bound).filter(|page| page % 3 == 0).for_each(|page| {
                set.insert(PageNumber(page));
            });
            assert_eq!(PageSet::from_bytes(&set.to_bytes(), bound), Some(set), "{bound}");
        }
        assert_eq!(PageSet::from_bytes(&[0xff], 8), Some(PageSet::full(8)));
        // A page beyond the bound, and sets of other sizes.
        assert_eq!(PageSet::from_bytes(&[0x80], 7), None);
        assert_eq!(PageSet::from_bytes(&[], 1), None);
        assert_eq!(PageSet::from_bytes(&[0, 0], 8), None);
    }

    proptest! {
        #[test]
        fn behaves_as_a_set_of_numbers(
            bound in 1u64..700,
            steps in prop::collection::vec((0u8..4, 0u64..700, 0u64..80), 0..60),
        ) {
            let mut set = PageSet::new(bound);
            let mut model = BTreeSet::new();
            for (step, at, length) in steps {
                let (at, end) = (at % bound, (at % bound + length).min(bound));
                match step {
                    0 => prop_assert_eq!(set.insert(PageNumber(at)), model.insert(at)),
                    1 => prop_assert_eq!(set.remove(PageNumber(at)), model.remove(&at)),
                    2 => {
                        set.insert_range(PageRange::new(at, end));
                        model.extend(at..end);
                    }
                    _ => {
                        set.remove_range(PageRange::new(at, end));
                        model.retain(|page| !(at..end).contains(page));
                    }
                }
            }
            prop_assert_eq!(set.count(), model.len() as u64);
            prop_assert!(set.iter().map(|page| page.0).eq(model.iter().copied()));
            let ranges: Vec<_> = set.ranges().collect();
            prop_assert!(ranges.iter().flat_map(PageRange::pages).eq(set.iter()));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
            let part = PageRange::new(bound / 3, bound * 2 / 3 + 1);
            let inside = set.iter().filter(|page| part.contains(*page) && page.0 < bound);
            let found: Vec<_> = set.ranges_in(part).flat_map(|range| range.pages()).collect();
            prop_assert!(inside.eq(found));
        }
    }

    #[test]
    fn full_holds_every_page_and_no_more() {
        for bound in [1, 63, 64, 65, 128, 1000] {
            assert_eq!(PageSet::full(bound).count(), bound);
            assert_eq!(
                PageSet::full(bound).ranges().collect::<Vec<_>>(),
                [PageRange::new(0, bound)]
            );
        }
    }

    #[test]
    fn union_and_subtract_undo_each_other() {
        let mut all = PageSet::new(200);
        let mut some = PageSet::new(200);
        some.insert_range(PageRange::new(60, 70));
        all.union_with(&some);
        all.subtract(&some);
        assert!(all.is_empty());
    }
}
