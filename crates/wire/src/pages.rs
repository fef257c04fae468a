//! Pages in a frame of kind [`Kind::Pages`](crate::frame::Kind::Pages): entries, one after the other.
//!
//! Each entry says which pages it holds. An entry of zeros is a range; one with bytes lists up to
//! [`MOST_PAGES`] page numbers, so that dirty pages that lie apart can be compressed together.
//! The reader checks each number against the guest's memory before it hands the entry out, and that no
//! entry reaches past the end of its frame. It expands nothing.

use dewar_codec::{Codec, WordBase};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};

/// The most pages of an entry with bytes.
pub const MOST_PAGES: usize = 64;
/// What an entry begins with: kind, 0, pages (2 bytes), bytes (4).
const HEAD: usize = 8;
/// The most pages of an entry of pages that are the same as others.
pub const MOST_SAME: usize = 1 << 12;
/// The forms of entries that have no codec; others have their codec's number.
const ZEROS: u8 = 255;
const SAME: u8 = 254;
const DELTAS: u8 = 253;
const RUNS: u8 = 252;

/// Why a frame's payload is no pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PagesError {
    /// An entry ends after its frame.
    #[error("pages that arrived end in the middle of one")]
    CutShort,
    /// A codec that this version does not know.
    #[error("pages arrived in an unknown form {0}")]
    UnknownForm(u8),
    /// No pages, too many, or more bytes than they are.
    #[error("{pages} pages arrived in {bytes} bytes")]
    WrongSize {
        /// How many.
        pages: u16,
        /// In how many bytes.
        bytes: u32,
    },
    /// The guest has no such page.
    #[error("page {page} arrived for a guest of {pages} pages")]
    OutOfRange {
        /// Its number.
        page: u64,
        /// How many pages the guest has.
        pages: u64,
    },
}

/// How pages with bytes are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Together, by a codec.
    Frame(Codec),
    /// One by one, as words that differ.
    Words(WordBase),
}

impl Form {
    fn number(self) -> u8 {
        match self {
            Self::Frame(codec) => codec as u8,
            Self::Words(WordBase::PagePresent) => DELTAS,
            Self::Words(WordBase::WordBefore) => RUNS,
        }
    }

    fn from_number(number: u8) -> Option<Self> {
        match number {
            DELTAS => Some(Self::Words(WordBase::PagePresent)),
            RUNS => Some(Self::Words(WordBase::WordBefore)),
            _ => Codec::from_number(number).map(Self::Frame),
        }
    }
}

/// Pages that arrived together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry<'b> {
    /// All zero.
    Zeros(PageRange),
    /// What these pages are, one after the other.
    Encoded {
        /// Which pages, at most [`MOST_PAGES`].
        pages: Vec<PageNumber>,
        /// How they are encoded.
        form: Form,
        /// Their bytes.
        bytes: &'b [u8],
    },
    /// Each the same as another that came on this connection before: (page, the other), at most
    /// [`MOST_SAME`].
    Same(Vec<(PageNumber, PageNumber)>),
}

/// Appends an entry of zeros to a payload, if there are any.
pub fn put_zeros(payload: &mut Vec<u8>, range: PageRange) {
    if range.is_empty() {
        return;
    }
    put_head(payload, ZEROS, 0, 16);
    payload.extend(range.start.0.to_le_bytes());
    payload.extend(range.count().to_le_bytes());
}

/// Appends an entry of pages to a payload.
///
/// # Panics
/// Where there are none or more than [`MOST_PAGES`].
pub fn put_pages(payload: &mut Vec<u8>, pages: &[PageNumber], form: Form, bytes: &[u8]) {
    assert!((1..=MOST_PAGES).contains(&pages.len()), "{} pages in an entry", pages.len());
    put_head(payload, form.number(), pages.len() as u16, bytes.len() as u32);
    payload.extend(pages.iter().flat_map(|page| page.0.to_le_bytes()));
    payload.extend_from_slice(bytes);
}

/// Appends an entry of pages that are each the same as another to a payload: (page, the other).
///
/// # Panics
/// Where there are none or more than [`MOST_SAME`].
pub fn put_same(payload: &mut Vec<u8>, pages: &[(PageNumber, PageNumber)]) {
    assert!((1..=MOST_SAME).contains(&pages.len()), "{} pages in an entry", pages.len());
    put_head(payload, SAME, pages.len() as u16, 16 * pages.len() as u32);
    for (page, other) in pages {
        payload.extend(page.0.to_le_bytes());
        payload.extend(other.0.to_le_bytes());
    }
}

/// How many bytes [`put_pages`] appends at most.
pub fn entry_bytes(pages: usize) -> usize {
    HEAD + pages * (8 + PAGE_BYTES)
}

fn put_head(payload: &mut Vec<u8>, form: u8, pages: u16, bytes: u32) {
    payload.extend([form, 0]);
    payload.extend(pages.to_le_bytes());
    payload.extend(bytes.to_le_bytes());
}

/// The entries of a payload, for a guest of so many pages. After an error there are no more.
pub fn entries(payload: &[u8], pages: u64) -> impl Iterator<Item = Result<Entry<'_>, PagesError>> {
    let mut left = payload;
    // A frame that says of more pages than there are that they are zeros only makes work.
    let mut zeros_left = pages;
    std::iter::from_fn(move || {
        if left.is_empty() {
            return None;
        }
        let entry = next_entry(&mut left, pages, &mut zeros_left);
        if entry.is_err() {
            left = &[];
        }
        Some(entry)
    })
}

fn next_entry<'b>(
    left: &mut &'b [u8],
    all: u64,
    zeros_left: &mut u64,
) -> Result<Entry<'b>, PagesError> {
    let mut take = |count: usize| -> Result<&'b [u8], PagesError> {
        let (bytes, rest) = left.split_at_checked(count).ok_or(PagesError::CutShort)?;
        *left = rest;
        Ok(bytes)
    };
    let head = take(HEAD)?;
    let form = head[0];
    if head[1] != 0 {
        return Err(PagesError::UnknownForm(head[1]));
    }
    let pages = u16::from_le_bytes([head[2], head[3]]);
    let bytes = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
    let wrong = PagesError::WrongSize { pages, bytes };
    if form == ZEROS {
        if (pages, bytes) != (0, 16) {
            return Err(wrong);
        }
        let (start, count) = (word(take(8)?), word(take(8)?));
        let end = start.checked_add(count).filter(|end| count > 0 && *end <= all);
        let out = PagesError::OutOfRange { page: start.saturating_add(count), pages: all };
        *zeros_left = zeros_left.checked_sub(count).ok_or(out)?;
        return end.map(|end| Entry::Zeros(PageRange::new(start, end))).ok_or(out);
    }
    let count = usize::from(pages);
    let in_range = |page| match page < all {
        true => Ok(PageNumber(page)),
        false => Err(PagesError::OutOfRange { page, pages: all }),
    };
    if form == SAME {
        if !(1..=MOST_SAME).contains(&count) || bytes as usize != 16 * count {
            return Err(wrong);
        }
        let pair = |both: &[u8]| Ok((in_range(word(&both[..8]))?, in_range(word(&both[8..]))?));
        return take(16 * count)?
            .chunks_exact(16)
            .map(pair)
            .collect::<Result<_, _>>()
            .map(Entry::Same);
    }
    let form = Form::from_number(form).ok_or(PagesError::UnknownForm(form))?;
    let whole = count * PAGE_BYTES;
    let fits = match form {
        Form::Frame(Codec::Raw) => bytes as usize == whole,
        _ => (bytes as usize) < whole,
    };
    if !(1..=MOST_PAGES).contains(&count) || !fits {
        return Err(wrong);
    }
    let numbers = take(8 * count)?.chunks_exact(8).map(word);
    let pages = numbers.map(in_range).collect::<Result<_, _>>()?;
    Ok(Entry::Encoded { pages, form, bytes: take(bytes as usize)? })
}

/// Eight bytes as a number.
fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| (word << 8) | u64::from(*byte))
}
