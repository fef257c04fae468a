//! The pages that stand still: those that can be copied straight from a running guest's memory.
//!
//! A page that is written while it is copied is in a later epoch's set, whatever was copied.

use crate::pieces::Pieces;
use dewar_memory::{KernelError, Ram, WriteTracker};
use dewar_units::{PageNumber, PageRange, PageSet};

/// Pages that a thread takes at a time: one page-table node.
pub const PIECE: u64 = 512;
/// So many parts of the memory take turns: what is in one may compress well, and in another not at all.
const STRIPES: u64 = 16;
/// The share of all pages below which the file is not asked which of them have memory.
const FEW: u64 = 16;

/// The pages of one pass over a guest's memory, and which of them no thread has taken yet.
#[derive(Debug)]
pub struct StandingPages<'p> {
    todo: &'p PageSet,
    holes: PageSet,
    pieces: Pieces,
}

impl<'p> StandingPages<'p> {
    /// A pass over the pages of `todo`.
    ///
    /// # Errors
    /// Where a RAM file cannot be read.
    pub fn new(ram: &Ram, todo: &'p PageSet) -> Result<Self, KernelError> {
        let all = PageRange::new(0, ram.pages());
        let mut holes = PageSet::new(ram.pages());
        // Of a few pages, all just written, asking would take longer than copying.
        if todo.count() > ram.pages() / FEW {
            holes.insert_range(all);
            for range in ram.data_ranges(all)? {
                holes.remove_range(range);
            }
        }
        Ok(Self { todo, holes, pieces: Pieces::striped(all, PIECE, STRIPES) })
    }

    /// The pages of the pass that have no memory behind them; one that gets some from now on is dirty.
    pub fn missing(&self) -> impl Iterator<Item = PageNumber> + '_ {
        self.todo.iter().filter(|page| self.holes.contains(*page))
    }

    /// All pages that have no memory behind them, but where there were too few to ask.
    pub fn into_holes(self) -> PageSet {
        self.holes
    }

    /// What no thread has taken yet.
    pub fn pieces(&self) -> &Pieces {
        &self.pieces
    }

    /// The pages of a piece that were not written since writes are recorded, of those that `is_wanted`;
    /// and how many were left to the epochs.
    ///
    /// # Errors
    /// Where the tracker fails.
    pub fn of(
        &self,
        piece: PageRange,
        tracker: &WriteTracker,
        is_wanted: impl Fn(PageNumber) -> bool,
    ) -> Result<(Vec<PageNumber>, u64), KernelError> {
        let has_memory =
            |page: &PageNumber| self.todo.contains(*page) && !self.holes.contains(*page);
        let mut pages: Vec<PageNumber> = piece.pages().filter(has_memory).collect();
        let before = pages.len();
        if before > 0 {
            let dirty = tracker.peek(piece)?;
            let is_dirty = |page| dirty.iter().any(|range| range.contains(page));
            pages.retain(|page| is_wanted(*page) && !is_dirty(*page));
        }
        let left = (before - pages.len()) as u64;
        Ok((pages, left))
    }
}
