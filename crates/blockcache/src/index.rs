//! What each block of a disk holds, as far as it is known.

use crate::hash::Fingerprint;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// What each block of a disk is known to hold: block -> fingerprint, of the blocks seen last.
///
/// A guest's memory can hold no more blocks than it has pages, so no more are remembered. About 70 bytes a block, which
/// is 18 MiB for each GiB of guest memory.
#[derive(Debug)]
pub struct Index {
    entries: FxHashMap<u64, Entry>,
    /// Blocks in the order in which they were seen. One that was seen again, or taken away, is there more than once, or
    /// for nothing: its number tells.
    order: VecDeque<(u64, u32)>,
    most: usize,
    next: u32,
}

#[derive(Debug)]
struct Entry {
    fingerprint: Fingerprint,
    number: u32,
}

impl Index {
    /// An empty one for at most so many blocks.
    pub fn new(most: usize) -> Self {
        Self { entries: FxHashMap::default(), order: VecDeque::new(), most: most.max(1), next: 0 }
    }

    /// What a block is known to hold.
    pub fn get(&self, block: u64) -> Option<&Fingerprint> {
        self.entries.get(&block).map(|entry| &entry.fingerprint)
    }

    /// Remembers what a block holds. Returns a block that is forgotten for it.
    pub fn insert(&mut self, block: u64, fingerprint: Fingerprint) -> Option<u64> {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        self.entries.insert(block, Entry { fingerprint, number });
        self.order.push_back((block, number));
        let forgotten = if self.entries.len() > self.most { self.forget_oldest() } else { None };
        if self.order.len() > 2 * self.most + 64 {
            let entries = &self.entries;
            self.order.retain(|(block, number)| {
                entries.get(block).is_some_and(|entry| entry.number == *number)
            });
        }
        forgotten
    }

    fn forget_oldest(&mut self) -> Option<u64> {
        while let Some((block, number)) = self.order.pop_front() {
            if self.entries.get(&block).is_some_and(|entry| entry.number == number) {
                self.entries.remove(&block);
                return Some(block);
            }
        }
        None
    }

    /// Forgets a block: it is about to hold something else.
    pub fn remove(&mut self, block: u64) {
        self.entries.remove(&block);
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.order.clear();
    }

    /// How many blocks it knows.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it knows none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All that it knows.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Fingerprint)> {
        self.entries.iter().map(|(block, entry)| (*block, &entry.fingerprint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(number: u64) -> Fingerprint {
        Fingerprint { candidate: number, proof: [number as u8; 16] }
    }

    #[test]
    fn the_oldest_are_forgotten_and_nothing_grows() {
        let mut index = Index::new(100);
        for number in 0..10_000u64 {
            index.insert(number % 150, of(number));
            if number % 3 == 0 {
                index.remove((number + 70) % 150);
            }
            assert!(index.len() <= 100 && index.order.len() <= 264);
        }
        for block in 0..100 {
            index.insert(block, of(block));
        }
        assert_eq!(index.insert(200, of(1)), Some(0));
        assert_eq!((index.get(0), index.get(1)), (None, Some(&of(1))));
    }
}
