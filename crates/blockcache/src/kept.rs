//! Pages of the memory that a guest had before it was reset, which hold blocks of its disks.

use crate::error::BlockError;
use dewar_kernel::punch_hole;
use dewar_units::PAGE_BYTES;
use rustc_hash::FxHashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// The memory that a guest had before it was reset: a file that no process has mapped any more.
#[derive(Debug)]
pub struct KeptMemory {
    file: File,
    pages: u64,
}

impl KeptMemory {
    /// That file, which nobody else uses.
    ///
    /// # Errors
    /// Where its size is not told.
    pub fn new(file: File) -> Result<Self, BlockError> {
        let bytes =
            file.metadata().map_err(BlockError::file("look at", Path::new("old memory")))?;
        Ok(Self { file, pages: bytes.len() / PAGE_BYTES as u64 })
    }

    /// How many pages it has, holes included.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Reads pages from one on.
    pub(crate) fn read(&self, page: u64, into: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(into, page * PAGE_BYTES as u64)
    }

    /// Gives pages back to the system; all that is left goes with the file.
    pub(crate) fn release(&self, page: u64, count: u64) {
        let bytes = PAGE_BYTES as u64;
        let _ = punch_hole(&self.file, page * bytes, count * bytes);
    }
}

/// Kept pages that were read. They are given back to the system when this is dropped: after they were sent, so that the
/// guest does not wait for it.
#[derive(Debug, Default)]
pub(crate) struct Spent(Vec<(Arc<KeptMemory>, u64)>);

impl Spent {
    pub(crate) fn add(&mut self, memory: Arc<KeptMemory>, page: u64) {
        self.0.push((memory, page));
    }
}

impl Drop for Spent {
    fn drop(&mut self) {
        self.0.sort_unstable_by_key(|(memory, page)| (Arc::as_ptr(memory), *page));
        let follows = |one: &(Arc<KeptMemory>, u64), next: &(Arc<KeptMemory>, u64)| {
            Arc::ptr_eq(&one.0, &next.0) && one.1 + 1 == next.1
        };
        for run in self.0.chunk_by(follows) {
            run[0].0.release(run[0].1, run.len() as u64);
        }
    }
}

/// Which blocks of a disk lie in which pages of memory before. Each page is one block's.
#[derive(Debug, Default)]
pub struct Kept {
    pages: FxHashMap<u64, (Arc<KeptMemory>, u64)>,
}

impl Kept {
    /// Notes that a block lies in a page.
    pub fn insert(&mut self, block: u64, memory: Arc<KeptMemory>, page: u64) {
        self.pages.insert(block, (memory, page));
    }

    /// Where a block lies; it is not kept any more then.
    pub fn take(&mut self, block: u64) -> Option<(Arc<KeptMemory>, u64)> {
        match self.pages.is_empty() {
            true => None,
            false => self.pages.remove(&block),
        }
    }

    /// Whether a block is kept.
    pub fn contains(&self, block: u64) -> bool {
        self.pages.contains_key(&block)
    }

    /// How many are kept.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Takes all away.
    pub fn drain(&mut self) -> impl Iterator<Item = (Arc<KeptMemory>, u64)> + '_ {
        self.pages.drain().map(|(_, kept)| kept)
    }
}
