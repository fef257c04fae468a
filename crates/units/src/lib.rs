//! The units that every part of Dewar counts in: page numbers, ranges and sets
//! of pages, byte sizes and durations as people write them.
#![forbid(unsafe_code)]

mod duration;
mod page;
mod set;
mod size;

pub use duration::{format_duration, parse_duration};
pub use page::{PAGE_BYTES, PageNumber, PageRange};
pub use set::PageSet;
pub use size::ByteSize;

/// A text that is not the size or duration it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseUnitError {
    /// The text as it was given.
    pub text: String,
    /// What it should have looked like.
    pub expected: &'static str,
}

impl std::fmt::Display for ParseUnitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "'{}' is not {}", self.text, self.expected)
    }
}

impl std::error::Error for ParseUnitError {}
