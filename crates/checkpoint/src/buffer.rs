//! Captured pages on their way to the image: one slot a page, so that a newer
//! copy replaces an older.

use dewar_memory::Ram;
use dewar_units::{PAGE_BYTES, PageNumber, PageSet};

/// Slots that are allocated together: 4 MiB.
const CHUNK_SLOTS: usize = 1024;
const NO_SLOT: u32 = u32::MAX;

/// A bounded buffer of pages, keyed by page.
#[derive(Debug)]
pub(crate) struct CaptureBuffer {
    /// The slot of each page of the guest.
    slots: Vec<u32>,
    /// Which pages are held.
    held: PageSet,
    chunks: Vec<Vec<u8>>,
    used: usize,
    limit: usize,
}

/// Pages of one chunk that are to be copied: slot in the chunk, page.
type Group = Vec<(usize, PageNumber)>;

impl CaptureBuffer {
    /// A buffer for a guest of `pages` pages that holds at most `limit`.
    pub(crate) fn new(pages: u64, limit: usize) -> Self {
        Self {
            slots: vec![NO_SLOT; pages as usize],
            held: PageSet::new(pages),
            chunks: Vec::new(),
            used: 0,
            limit: limit.min(pages as usize),
        }
    }

    /// The pages that it holds.
    pub(crate) fn held(&self) -> &PageSet {
        &self.held
    }

    /// Makes room for `more` pages without page faults later.
    pub(crate) fn reserve(&mut self, more: usize) {
        let wanted = (self.used + more).min(self.limit).div_ceil(CHUNK_SLOTS);
        while self.chunks.len() < wanted {
            let mut chunk = vec![0; CHUNK_SLOTS * PAGE_BYTES];
            // Zeros from the kernel have no memory behind them until written.
            chunk.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 1);
            self.chunks.push(chunk);
        }
    }

    /// Copies `pages` out of `ram` with `threads` threads, as far as slots
    /// reach below `fill` (a share of the limit). Returns those left over.
    pub(crate) fn capture(
        &mut self,
        ram: &Ram,
        pages: &PageSet,
        fill: f64,
        threads: usize,
    ) -> Vec<PageNumber> {
        let bound = (self.limit as f64 * fill) as usize;
        let mut groups: Vec<Group> = Vec::new();
        let mut left_over = Vec::new();
        for page in pages.iter() {
            let slot = match self.slots[page.index()] {
                NO_SLOT if self.used < bound => {
                    let slot = self.used;
                    self.used += 1;
                    self.slots[page.index()] = slot as u32;
                    self.held.insert(page);
                    slot
                }
                NO_SLOT => {
                    left_over.push(page);
                    continue;
                }
                slot => slot as usize,
            };
            let chunk = slot / CHUNK_SLOTS;
            groups.resize_with(groups.len().max(chunk + 1), Vec::new);
            groups[chunk].push((slot % CHUNK_SLOTS, page));
        }
        while self.chunks.len() < groups.len() {
            self.chunks.push(vec![0; CHUNK_SLOTS * PAGE_BYTES]);
        }
        copy_groups(ram, &mut self.chunks, groups, threads);
        left_over
    }

    /// The copy of a page that is held.
    ///
    /// # Panics
    /// Where it is not.
    pub(crate) fn page(&self, page: PageNumber) -> &[u8] {
        let slot = self.slots[page.index()] as usize;
        let start = slot % CHUNK_SLOTS * PAGE_BYTES;
        &self.chunks[slot / CHUNK_SLOTS][start..start + PAGE_BYTES]
    }
}

fn copy_groups(ram: &Ram, chunks: &mut [Vec<u8>], groups: Vec<Group>, threads: usize) {
    let mut shares: Vec<Vec<(&mut Vec<u8>, Group)>> = Vec::new();
    shares.resize_with(threads.max(1), Vec::new);
    let busy = chunks.iter_mut().zip(groups).filter(|(_, group)| !group.is_empty());
    for (index, work) in busy.enumerate() {
        shares[index % threads.max(1)].push(work);
    }
    let copy = |share: Vec<(&mut Vec<u8>, Group)>| {
        for (chunk, group) in share {
            for (slot, page) in group {
                let start = slot * PAGE_BYTES;
                ram.copy_page(page, &mut chunk[start..start + PAGE_BYTES]);
            }
        }
    };
    std::thread::scope(|scope| {
        let first = shares.pop();
        for share in shares.into_iter().filter(|share| !share.is_empty()) {
            scope.spawn(|| copy(share));
        }
        first.map(copy);
    });
}
