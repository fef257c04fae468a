//! The buffer of captured pages. Each page has one slot: a newer copy replaces an older one.
//!
//! To get fresh memory from the kernel can take several times as long as to copy a page, above all in a
//! virtual machine whose host backs memory when it is first touched. The pause must not wait for that. So
//! before the pause the buffer gets the memory that the pause will need, touches it, and sets it aside.
//!
//! Epochs have time: they get memory when they need it, and never use what is set aside. Otherwise it had to
//! be got again after each epoch, while the guest writes on.

use dewar_memory::Ram;
use dewar_units::{PAGE_BYTES, PageNumber, PageSet};

/// Slots that are allocated together: 4 MiB.
const CHUNK_SLOTS: usize = 1024;
const NO_SLOT: u32 = u32::MAX;
/// Share of the limit that epochs may fill; the rest is for the pause.
const EPOCH_SHARE: f64 = 0.75;

/// A bounded buffer of pages, keyed by page.
#[derive(Debug)]
pub(crate) struct CaptureBuffer {
    /// The slot of each page of the guest.
    slots: Vec<u32>,
    /// Which pages are held.
    held: PageSet,
    chunks: Vec<Vec<u8>>,
    /// Chunks with memory behind them, for the pause.
    set_aside: Vec<Vec<u8>>,
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
            set_aside: Vec::new(),
            used: 0,
            limit: limit.min(pages as usize),
        }
    }

    /// The pages that it holds.
    pub(crate) fn held(&self) -> &PageSet {
        &self.held
    }

    /// Sets memory aside for a pause that copies `pages`, as far as the limit
    /// leaves it to the pause.
    pub(crate) fn set_aside(&mut self, pages: usize) {
        let wanted = pages.min(self.limit - self.epochs_limit()).div_ceil(CHUNK_SLOTS);
        while self.set_aside.len() < wanted {
            let mut chunk = vec![0; CHUNK_SLOTS * PAGE_BYTES];
            // Zeros from the kernel have no memory behind them until written.
            chunk.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = 1);
            self.set_aside.push(chunk);
        }
    }

    fn epochs_limit(&self) -> usize {
        (self.limit as f64 * EPOCH_SHARE) as usize
    }

    /// Copies `pages` out of `ram` while the guest runs, on all of `threads`
    /// threads. Returns those that there was no room for.
    pub(crate) fn capture(
        &mut self,
        ram: &Ram,
        pages: &PageSet,
        threads: usize,
    ) -> Vec<PageNumber> {
        self.copy(ram, pages, self.epochs_limit(), threads)
    }

    /// The same in the pause.
    pub(crate) fn capture_stopped(
        &mut self,
        ram: &Ram,
        pages: &PageSet,
        threads: usize,
    ) -> Vec<PageNumber> {
        self.chunks.append(&mut self.set_aside);
        self.copy(ram, pages, self.limit, threads)
    }

    /// Copies pages, as far as slots reach below `bound`.
    fn copy(
        &mut self,
        ram: &Ram,
        pages: &PageSet,
        bound: usize,
        threads: usize,
    ) -> Vec<PageNumber> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// Slots of the buffer, and pages of the guest.
    const PAGES: usize = 8 * CHUNK_SLOTS;

    fn ram() -> Ram {
        let file = tempfile::tempfile().expect("file");
        for page in 0..PAGES {
            file.write_all_at(&[page as u8; PAGE_BYTES], (page * PAGE_BYTES) as u64)
                .expect("write");
        }
        let mut ram = Ram::default();
        ram.add("ram".to_owned(), file, (PAGES * PAGE_BYTES) as u64, 0).expect("region");
        ram
    }

    fn pages(range: std::ops::Range<usize>) -> PageSet {
        let mut set = PageSet::new(PAGES as u64);
        for page in range {
            set.insert(PageNumber(page as u64));
        }
        set
    }

    #[test]
    fn what_is_set_aside_for_the_pause_is_left_by_epochs_and_within_the_limit() {
        let ram = ram();
        let mut buffer = CaptureBuffer::new(PAGES as u64, PAGES);
        buffer.set_aside(PAGES);
        // The share of the pause, not the whole.
        let share = PAGES / 4 / CHUNK_SLOTS;
        assert_eq!(buffer.set_aside.len(), share);
        let left_over = buffer.capture(&ram, &pages(0..PAGES), 2);
        assert_eq!(left_over.len(), PAGES / 4);
        assert_eq!((buffer.chunks.len(), buffer.set_aside.len()), (8 - share, share));

        let left_over = buffer.capture_stopped(&ram, &pages(0..PAGES), 2);
        assert!(left_over.is_empty());
        assert_eq!(buffer.chunks.len(), 8, "no memory but that which was set aside");
        for page in 0..PAGES {
            assert_eq!(buffer.page(PageNumber(page as u64)), [page as u8; PAGE_BYTES]);
        }
    }
}
