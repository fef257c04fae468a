//! Looking through the memory of before for what the disks hold now.

use crate::error::BlockError;
use crate::export::Export;
use crate::hash::{Fingerprint, Hasher, candidate};
use crate::kept::KeptMemory;
use dewar_kernel::data_ranges;
use dewar_units::{PAGE_BYTES, PageRange};
use rustc_hash::FxHashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages that are read at once.
const PIECE: u64 = 64;

/// What a search found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Found {
    /// Blocks of which was known what they hold.
    pub known: u64,
    /// Pages that were looked at.
    pub pages: u64,
    /// Pages that are kept: each holds what a block holds.
    pub kept: u64,
    /// Pages that looked like a block's and were none.
    pub refused: u64,
    /// Pages that would have been kept, and were too many.
    pub too_many: u64,
    /// How long it took.
    pub took: Duration,
}

impl Found {
    /// Adds what was found in more memory.
    pub fn add(&mut self, more: &Self) {
        self.known = self.known.max(more.known);
        self.pages += more.pages;
        self.kept += more.kept;
        self.refused += more.refused;
        self.too_many += more.too_many;
        self.took += more.took;
    }
}

/// Blocks by the quick hash of what they hold; most hashes are of one.
type Candidates = FxHashMap<u64, Vec<(usize, u64, Fingerprint)>>;

/// Searches memory for what the disks hold, keeps at most so many pages, and gives all others back to the system.
///
/// It runs beside the guest, which reads and writes meanwhile: a page is kept only if its block still holds the same.
///
/// # Errors
/// Where the memory cannot be read; nothing more is kept then.
pub fn find(
    memory: &Arc<KeptMemory>,
    exports: &[Arc<Export>],
    hasher: &Hasher,
    most: u64,
) -> Result<Found, BlockError> {
    let began = Instant::now();
    let mut candidates = candidates(exports);
    let mut found =
        Found { known: candidates.values().map(|it| it.len() as u64).sum(), ..Found::default() };
    let failed = |cause: dewar_kernel::KernelError| BlockError::File {
        operation: "search",
        path: Path::new("the memory before the reboot").to_owned(),
        cause: cause.cause,
    };
    let all = PageRange::new(0, memory.pages());
    let mut buffer = vec![0; PIECE as usize * PAGE_BYTES];
    for range in data_ranges(memory.file(), all).map_err(failed)? {
        for piece in range.pieces(PIECE) {
            let first = piece.start.0;
            let bytes = &mut buffer[..(piece.end.0 - first) as usize * PAGE_BYTES];
            let read = memory.read(first, bytes);
            read.map_err(BlockError::file("read", "the memory before the reboot"))?;
            let mut unwanted = first;
            for (page, content) in (first..).zip(bytes.chunks_exact(PAGE_BYTES)) {
                found.pages += 1;
                if !is_kept(
                    content,
                    page,
                    &mut candidates,
                    &mut found,
                    (exports, hasher, memory, most),
                ) {
                    continue;
                }
                found.kept += 1;
                free_pages(memory, unwanted, page);
                unwanted = page + 1;
            }
            free_pages(memory, unwanted, piece.end.0);
        }
    }
    found.took = began.elapsed();
    Ok(found)
}

fn candidates(exports: &[Arc<Export>]) -> Candidates {
    let mut candidates = Candidates::default();
    for (number, export) in exports.iter().enumerate() {
        for (block, fingerprint) in export.known() {
            candidates.entry(fingerprint.candidate).or_default().push((number, block, fingerprint));
        }
    }
    candidates
}

/// Whether a page holds what a block holds that no other page is kept for.
fn is_kept(
    content: &[u8],
    page: u64,
    candidates: &mut Candidates,
    found: &mut Found,
    (exports, hasher, memory, most): (&[Arc<Export>], &Hasher, &Arc<KeptMemory>, u64),
) -> bool {
    if content.iter().all(|byte| *byte == 0) {
        return false;
    }
    let Some(blocks) = candidates.get_mut(&candidate(content)) else { return false };
    if blocks.is_empty() {
        return false;
    }
    if found.kept >= most {
        found.too_many += 1;
        return false;
    }
    let proof = hasher.proof(content);
    while let Some((export, block, fingerprint)) = blocks.pop() {
        if fingerprint.proof != proof {
            found.refused += 1;
        } else if exports[export].keep(block, &proof, memory, page) {
            return true;
        }
    }
    false
}

fn free_pages(memory: &KeptMemory, from: u64, to: u64) {
    if from < to {
        memory.release(from, to - from);
    }
}
