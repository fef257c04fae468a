//! Reads of files, counted by page.

use crate::manifest::{FileIdentity, HotFile, HotRange};
use crate::tree::{FileKey, Found};
use std::collections::{BTreeMap, HashMap};

/// A page that was read so often is hot: one that was read once may be part of a scan.
const HOT: u32 = 2;
/// Pages between two hot ranges that are taken along: they cost less than another read does.
const GAP: u64 = 4;

/// How often each page was read.
#[derive(Debug, Default)]
pub struct Reads {
    files: HashMap<FileKey, BTreeMap<u64, u32>>,
    /// For each thread and file the last read.
    last: HashMap<(i32, FileKey), Read>,
    /// Pages that were counted.
    counted: u64,
}

/// Pages of a read that are counted, and of all: a guest that reads in vain costs no more memory and time than that.
const MOST_OF_A_READ: u64 = 1 << 16;
const MOST_OF_ALL: u64 = 1 << 26;
/// Threads and files whose last reads are known.
const MOST_LAST: usize = 1 << 16;

/// What the kernel tells of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Read {
    pub(crate) thread: i32,
    pub(crate) file: FileKey,
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Reads {
    /// Counts a read; says whether it did. The kernel tells of a long one again and again, as it goes on; and one
    /// that begins in the page in which the one before it ended goes on, too.
    pub(crate) fn add(&mut self, read: Read) -> bool {
        if self.last.len() >= MOST_LAST {
            self.last.clear();
        }
        let before = self.last.insert((read.thread, read.file), read);
        if before.is_some_and(|it| it.last == read.last && it.first < read.first) {
            return true;
        }
        let first = match before {
            Some(before) if before.last == read.first => read.first + 1,
            _ => read.first,
        };
        let last = read.last.min(first.saturating_add(MOST_OF_A_READ));
        if self.counted > MOST_OF_ALL {
            return false;
        }
        let pages = self.files.entry(read.file).or_default();
        for page in first..=last {
            *pages.entry(page).or_default() += 1;
            self.counted += 1;
        }
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Whether a file was read at all.
    pub(crate) fn has(&self, file: FileKey) -> bool {
        self.files.contains_key(&file)
    }

    /// The files of these that have hot pages.
    pub(crate) fn hot(&self, found: Vec<Found>) -> Vec<HotFile> {
        let hot = |found: Found| {
            let identity = FileIdentity::of(&found.metadata);
            let all = identity.bytes.div_ceil(dewar_units::PAGE_BYTES as u64);
            let hot = ranges(self.files.get(&found.key)?, all);
            (!hot.is_empty()).then_some(HotFile { path: found.inside, identity, hot })
        };
        found.into_iter().filter_map(hot).collect()
    }
}

/// The hot ranges of a file of so many pages.
fn ranges(pages: &BTreeMap<u64, u32>, all: u64) -> Vec<HotRange> {
    let mut ranges: Vec<(HotRange, u64)> = Vec::new();
    for (page, uses) in pages.range(..all).filter(|(_, uses)| **uses >= HOT) {
        match ranges.last_mut() {
            Some((range, sum)) if *page <= range.end + GAP && is_alike(range.uses, *uses) => {
                range.end = page + 1;
                *sum += u64::from(*uses);
                range.uses = (*sum / (range.end - range.start)).max(1) as u32;
            }
            _ => {
                let range = HotRange { start: *page, end: page + 1, uses: *uses };
                ranges.push((range, u64::from(*uses)));
            }
        }
    }
    ranges.into_iter().map(|(range, _)| range).collect()
}

/// Whether pages are used about as much.
fn is_alike(one: u32, other: u32) -> bool {
    one.max(other) <= 4 * one.min(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileKey = (1, 2);

    fn reads(reads: &[(u64, u64)]) -> Reads {
        let mut all = Reads::default();
        for (first, last) in reads {
            all.add(Read { thread: 1, file: FILE, first: *first, last: *last });
        }
        all
    }

    fn hot(all: &Reads) -> Vec<(u64, u64, u32)> {
        ranges(&all.files[&FILE], 100).into_iter().map(Into::into).collect()
    }

    #[test]
    fn what_is_read_twice_is_hot() {
        let scan = (0, 99);
        let all = reads(&[(10, 12), scan, (50, 50), (10, 12), (50, 50), (10, 12)]);
        assert_eq!(hot(&all), [(10, 13, 4), (50, 51, 3)]);
        assert!(hot(&reads(&[scan])).is_empty());
        // Beyond its end there is nothing.
        assert!(hot(&reads(&[(100, 100), (0, 0), (100, 100)])).is_empty());
    }

    #[test]
    fn a_long_read_counts_once_however_often_it_is_told_of() {
        assert!(hot(&reads(&[(0, 99), (16, 99), (32, 99), (96, 99)])).is_empty());
        // Short ones, one after the other, that begin and end within pages: as tar(1) and buffered readers make them.
        let records: Vec<(u64, u64)> =
            (0..30).map(|it| (it * 10_240 / 4096, ((it + 1) * 10_240 - 1) / 4096)).collect();
        assert!(hot(&reads(&records)).is_empty());
        assert!(hot(&reads(&[(0, 0), (0, 0), (0, 1), (1, 1), (1, 2)])).is_empty());
        // Another read of the same.
        assert_eq!(hot(&reads(&[(0, 9), (4, 9), (0, 9), (4, 9)])), [(0, 10, 2)]);
    }

    #[test]
    fn a_small_gap_is_taken_along() {
        let twice = |pages: &[u64]| {
            let two = |page: &u64| [(*page, *page), (99, 99), (*page, *page)];
            reads(&pages.iter().flat_map(two).collect::<Vec<_>>())
        };
        let first = |pages: &[u64]| hot(&twice(pages))[0];
        assert_eq!(first(&[10, 15]), (10, 16, 1));
        assert_eq!(first(&[10, 16]), (10, 11, 2));
    }
}
