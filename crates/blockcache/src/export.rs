//! A disk as it is served: what is asked of it, in order, with the cache before it.

use crate::buffer::Buffer;
use crate::disk::DiskFile;
use crate::hash::{Fingerprint, Hasher, candidate};
use crate::index::Index;
use crate::kept::{Kept, KeptMemory, Spent};
use crate::order::RangeLocks;
use dewar_units::PAGE_BYTES;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

const BLOCK: u64 = PAGE_BYTES as u64;

/// A disk as it is served.
#[derive(Debug)]
pub struct Export {
    disk: DiskFile,
    locks: RangeLocks,
    hasher: Arc<Hasher>,
    /// Nothing where it has no cache.
    cache: Option<Mutex<Cache>>,
    counts: Counts,
}

#[derive(Debug)]
struct Cache {
    index: Index,
    kept: Kept,
}

/// A kept page that is about to be sent.
struct TakenPage {
    block: u64,
    memory: Arc<KeptMemory>,
    page: u64,
    /// The quick hash of what it held when it was kept: that this is the block's was proven then.
    holds: u64,
}

impl TakenPage {
    /// Whether both can be read at once.
    fn is_before(&self, next: &Self) -> bool {
        let is_same = Arc::ptr_eq(&self.memory, &next.memory);
        is_same && self.block + 1 == next.block && self.page + 1 == next.page
    }
}

/// Of blocks, since the server began.
#[derive(Debug, Default)]
struct Counts {
    hits: AtomicU64,
    misses: AtomicU64,
    wrong: AtomicU64,
}

/// Where the blocks came from that were read, since the server began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReadFrom {
    /// From the memory before a reboot.
    pub memory: u64,
    /// From the disk.
    pub disk: u64,
    /// Pages that were kept and did not hold any more what they had held: they were not used.
    pub wrong: u64,
}

impl Export {
    /// A disk with a cache that knows at most so many blocks; with none, it has no cache.
    pub fn new(disk: DiskFile, hasher: Arc<Hasher>, most_blocks: usize) -> Self {
        let cache = || Mutex::new(Cache { index: Index::new(most_blocks), kept: Kept::default() });
        let cache = (most_blocks > 0).then(cache);
        Self { disk, locks: RangeLocks::default(), hasher, cache, counts: Counts::default() }
    }

    /// The disk.
    pub fn disk(&self) -> &DiskFile {
        &self.disk
    }

    /// Reads a part of the disk. It lies within the disk, and is aligned. What is returned is dropped when it was sent.
    pub(crate) fn read(&self, into: &mut Buffer, offset: u64) -> io::Result<Spent> {
        let bytes = into.bytes().len() as u64;
        let _lock = self.locks.to_read(touched(offset, bytes));
        let (missing, spent) = self.read_kept(into, offset);
        for part in &missing {
            let at = (part.start - offset) as usize..(part.end - offset) as usize;
            self.disk.read(&mut into.bytes_mut()[at], part.start)?;
        }
        let from_disk = missing.iter().map(|it| it.end - it.start).sum::<u64>() / BLOCK;
        self.counts.misses.fetch_add(from_disk, Relaxed);
        // Without its locks others may write it.
        if self.disk.has_locks() {
            missing.into_iter().for_each(|part| self.remember(into.bytes(), offset, part));
        }
        Ok(spent)
    }

    /// Reads what is kept of a part of the disk, and says what is not.
    fn read_kept(&self, into: &mut Buffer, offset: u64) -> (Vec<Range<u64>>, Spent) {
        let whole = offset..offset + into.bytes().len() as u64;
        let (mut missing, mut spent) = (Vec::new(), Spent::default());
        let mut from = whole.start;
        let taken = self.take_kept(full(&whole));
        for run in taken.chunk_by(TakenPage::is_before) {
            let at = (run[0].block * BLOCK - offset) as usize;
            let slots = &mut into.bytes_mut()[at..][..run.len() * PAGE_BYTES];
            let is_read = run[0].memory.read(run[0].page, slots).is_ok();
            for (taken, slot) in run.iter().zip(slots.chunks_exact(PAGE_BYTES)) {
                spent.add(taken.memory.clone(), taken.page);
                // Read last of all, so it is what is sent.
                if !is_read || candidate(slot) != taken.holds {
                    self.counts.wrong.fetch_add(1, Relaxed);
                    continue;
                }
                self.counts.hits.fetch_add(1, Relaxed);
                let at = taken.block * BLOCK;
                if from < at {
                    missing.push(from..at);
                }
                from = at + BLOCK;
            }
        }
        if from < whole.end {
            missing.push(from..whole.end);
        }
        (missing, spent)
    }

    fn take_kept(&self, blocks: Range<u64>) -> Vec<TakenPage> {
        let Some(mut cache) = self.cache() else { return Vec::new() };
        if cache.kept.is_empty() {
            return Vec::new();
        }
        let cache = &mut *cache;
        let taken = blocks.filter_map(|block| {
            let (memory, page) = cache.kept.take(block)?;
            match cache.index.get(block) {
                Some(known) => Some(TakenPage { block, memory, page, holds: known.candidate }),
                None => {
                    memory.release(page, 1);
                    None
                }
            }
        });
        taken.collect()
    }

    /// Remembers what the full blocks of a part hold, whose bytes these are, from `offset` on. The caller has the lock.
    fn remember(&self, bytes: &[u8], offset: u64, part: Range<u64>) {
        if self.cache.is_none() {
            return;
        }
        let known: Vec<(u64, Fingerprint)> = full(&part)
            .filter_map(|block| {
                let block_bytes = &bytes[(block * BLOCK - offset) as usize..][..PAGE_BYTES];
                // Zeros are in memory a thousand times, and are no cache of anything.
                let is_zero = block_bytes.iter().all(|byte| *byte == 0);
                (!is_zero).then(|| (block, self.hasher.fingerprint(block_bytes)))
            })
            .collect();
        let Some(mut cache) = self.cache() else { return };
        for (block, fingerprint) in known {
            if let Some(forgotten) = cache.index.insert(block, fingerprint) {
                release(cache.kept.take(forgotten));
            }
        }
    }

    /// Writes a part of the disk. `is_lasting` says that it is to be on the disk when this returns.
    pub(crate) fn write(&self, bytes: &Buffer, offset: u64, is_lasting: bool) -> io::Result<()> {
        let part = offset..offset + bytes.bytes().len() as u64;
        let _lock = self.locks.to_write(touched(offset, bytes.bytes().len() as u64));
        self.forget(&part);
        self.disk.write(bytes.bytes(), offset)?;
        if is_lasting {
            self.disk.flush()?;
        }
        self.remember(bytes.bytes(), offset, part);
        Ok(())
    }

    /// Makes zeros of a part; `keeps` says that its place is to stay its own.
    pub(crate) fn zero(
        &self,
        offset: u64,
        bytes: u64,
        keeps: bool,
        is_lasting: bool,
    ) -> io::Result<()> {
        let _lock = self.locks.to_write(touched(offset, bytes));
        self.forget(&(offset..offset + bytes));
        self.disk.zero(offset, bytes, keeps)?;
        if is_lasting { self.disk.flush() } else { Ok(()) }
    }

    /// Gives the place of a part back.
    pub(crate) fn trim(&self, offset: u64, bytes: u64, is_lasting: bool) -> io::Result<()> {
        let _lock = self.locks.to_write(touched(offset, bytes));
        self.forget(&(offset..offset + bytes));
        self.disk.trim(offset, bytes)?;
        if is_lasting { self.disk.flush() } else { Ok(()) }
    }

    pub(crate) fn flush(&self) -> io::Result<()> {
        self.disk.flush()
    }

    /// Forgets what the blocks of a part hold, that it touches.
    fn forget(&self, part: &Range<u64>) {
        let Some(mut cache) = self.cache() else { return };
        let cache = &mut *cache;
        if cache.index.is_empty() {
            return;
        }
        for block in touched(part.start, part.end - part.start) {
            cache.index.remove(block);
            release(cache.kept.take(block));
        }
    }

    /// All blocks whose content is known.
    pub(crate) fn known(&self) -> Vec<(u64, Fingerprint)> {
        let Some(cache) = self.cache() else { return Vec::new() };
        cache.index.iter().map(|(block, fingerprint)| (block, *fingerprint)).collect()
    }

    /// Keeps a page that holds a block, as long as that is known to hold this. Says whether it does.
    pub(crate) fn keep(
        &self,
        block: u64,
        proof: &[u8; 16],
        memory: &Arc<KeptMemory>,
        page: u64,
    ) -> bool {
        let Some(mut cache) = self.cache() else { return false };
        let is_so = cache.index.get(block).is_some_and(|known| known.proof == *proof);
        if !is_so || cache.kept.contains(block) {
            return false;
        }
        cache.kept.insert(block, memory.clone(), page);
        true
    }

    /// Keeps nothing any more.
    pub fn release_all(&self) {
        if let Some(mut cache) = self.cache() {
            cache.kept.drain().for_each(|it| release(Some(it)));
        }
    }

    /// Gives up the locks on the disk. What is known of it is forgotten: others may write it.
    pub(crate) fn leave_to_others(&self) {
        self.disk.release_locks();
        self.release_all();
        if let Some(mut cache) = self.cache() {
            cache.index.clear();
        }
    }

    /// Blocks of which is known what they hold, and how many of them are kept.
    pub fn known_and_kept(&self) -> (usize, usize) {
        self.cache().map_or((0, 0), |cache| (cache.index.len(), cache.kept.len()))
    }

    /// Where what was read came from.
    pub fn read_from(&self) -> ReadFrom {
        let Counts { hits, misses, wrong } = &self.counts;
        ReadFrom {
            memory: hits.load(Relaxed),
            disk: misses.load(Relaxed),
            wrong: wrong.load(Relaxed),
        }
    }

    fn cache(&self) -> Option<MutexGuard<'_, Cache>> {
        Some(self.cache.as_ref()?.lock().unwrap_or_else(|broken| broken.into_inner()))
    }
}

fn release(taken: Option<(Arc<KeptMemory>, u64)>) {
    if let Some((memory, page)) = taken {
        memory.release(page, 1);
    }
}

/// The blocks that a part of a disk touches.
fn touched(offset: u64, bytes: u64) -> Range<u64> {
    offset / BLOCK..(offset + bytes).div_ceil(BLOCK)
}

/// The blocks that lie whole in a part of a disk.
fn full(part: &Range<u64>) -> Range<u64> {
    part.start.div_ceil(BLOCK)..part.end / BLOCK
}
