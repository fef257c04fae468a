//! A page as the 64-bit words in which it differs from something that its reader has: from the version
//! of the page that is there (a *delta*), or, word for word, from the word before (*runs*).
//!
//! ```text
//! summary    1 byte             bit i: one of the words 64 i to 64 i + 63 differs
//! map        8 bytes a set bit  bit j: word 64 i + j differs
//! words      8 bytes each       those that differ, in order
//! ```
//!
//! All numbers are little-endian. A page of which one word was written is 17 bytes so; one that is the
//! same word all over is as long.

use crate::frame::CodecError;
use dewar_units::PAGE_BYTES;

/// Bytes of a word, and words that one word of the map is for.
const WORD: usize = 8;
const GROUP: usize = 64;
const GROUPS: usize = PAGE_BYTES / WORD / GROUP;

/// What the words of a page are compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordBase {
    /// Each with the word before it; the first with zero.
    WordBefore,
    /// Each with the one in its place in the page that the reader has.
    PagePresent,
}

/// Appends a page as the words that differ from those of `present`, or from the word before where that is
/// nothing. Says whether it did: not where it would take more than `most` bytes.
///
/// # Panics
/// Where one of them is not a page long.
pub fn encode_words(page: &[u8], present: Option<&[u8]>, most: usize, out: &mut Vec<u8>) -> bool {
    assert_eq!(page.len(), PAGE_BYTES);
    let start = out.len();
    let mut map = [0_u64; GROUPS];
    let (mut summary, mut bytes) = (0_u8, 1);
    let mut before = 0;
    for (group, words) in page.chunks_exact(GROUP * WORD).enumerate() {
        map[group] = match present {
            Some(present) => differing(words, &present[group * GROUP * WORD..][..GROUP * WORD]),
            None => changes(words, &mut before),
        };
        if map[group] != 0 {
            summary |= 1 << group;
            bytes += WORD + WORD * map[group].count_ones() as usize;
        }
        if bytes > most {
            return false;
        }
    }
    out.reserve(bytes);
    out.push(summary);
    let used = map.iter().filter(|word| **word != 0);
    out.extend(used.flat_map(|word| word.to_le_bytes()));
    for (group, mut left) in map.into_iter().enumerate() {
        while left != 0 {
            let place = (group * GROUP + left.trailing_zeros() as usize) * WORD;
            out.extend_from_slice(&page[place..place + WORD]);
            left &= left - 1;
        }
    }
    debug_assert_eq!(out.len(), start + bytes);
    true
}

/// Which words of two groups differ, a bit each.
fn differing(ours: &[u8], theirs: &[u8]) -> u64 {
    let pairs = ours.chunks_exact(WORD).zip(theirs.chunks_exact(WORD));
    pairs
        .enumerate()
        .fold(0, |map, (index, (one, other))| map | (u64::from(word(one) != word(other)) << index))
}

/// Which words of a group are not the one before.
fn changes(words: &[u8], before: &mut u64) -> u64 {
    words.chunks_exact(WORD).enumerate().fold(0, |map, (index, bytes)| {
        let now = word(bytes);
        let is_new = now != std::mem::replace(before, now);
        map | (u64::from(is_new) << index)
    })
}

/// Makes a page of what [`encode_words`] appended, and goes past it. For a delta `page` is what is present.
///
/// # Errors
/// Where the bytes end too soon, or a set bit of the summary stands for nothing.
///
/// # Panics
/// Where `page` is not a page long.
pub fn decode_words(from: &mut &[u8], base: WordBase, page: &mut [u8]) -> Result<(), CodecError> {
    assert_eq!(page.len(), PAGE_BYTES);
    let mut take = |count: usize| -> Result<&[u8], CodecError> {
        let (bytes, rest) = from.split_at_checked(count).ok_or(CodecError::WrongWords)?;
        *from = rest;
        Ok(bytes)
    };
    let summary = take(1)?[0];
    let groups = (0..GROUPS).filter(|group| (summary >> group) & 1 == 1);
    let mut map = [0_u64; GROUPS];
    for (group, bits) in groups.zip(take(WORD * summary.count_ones() as usize)?.chunks_exact(WORD))
    {
        map[group] = word(bits);
        if map[group] == 0 {
            return Err(CodecError::WrongWords);
        }
    }
    let count: u32 = map.iter().map(|bits| bits.count_ones()).sum();
    let mut words = take(WORD * count as usize)?.chunks_exact(WORD);
    let mut before = [0; WORD];
    for (index, place) in page.chunks_exact_mut(WORD).enumerate() {
        if (map[index / GROUP] >> (index % GROUP)) & 1 == 1 {
            // There are as many as bits are set.
            before.copy_from_slice(words.next().unwrap_or(&[0; WORD]));
            place.copy_from_slice(&before);
        } else if base == WordBase::WordBefore {
            place.copy_from_slice(&before);
        }
    }
    Ok(())
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[index]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A page of runs of words: (word, how many).
    fn page_of(runs: &[(u64, usize)]) -> Vec<u8> {
        let words = runs.iter().flat_map(|(word, count)| std::iter::repeat_n(*word, *count));
        let mut page: Vec<u8> = words.flat_map(u64::to_le_bytes).take(PAGE_BYTES).collect();
        page.resize(PAGE_BYTES, 0xa5);
        page
    }

    fn pages() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec((0_u64..4, 1_usize..200), 0..30).prop_map(|runs| page_of(&runs))
    }

    proptest! {
        #[test]
        fn pages_come_back(page in pages(), present in pages(), next in pages()) {
            for (base, present) in [(WordBase::PagePresent, Some(&present[..])), (WordBase::WordBefore, None)] {
                let mut bytes = Vec::new();
                prop_assert!(encode_words(&page, present, usize::MAX, &mut bytes));
                let first = bytes.len();
                prop_assert!(encode_words(&next, Some(&page), usize::MAX, &mut bytes));
                let (mut left, mut back) = (&bytes[..], present.unwrap_or(&[9; PAGE_BYTES]).to_vec());
                decode_words(&mut left, base, &mut back).expect("decode");
                prop_assert_eq!(&back, &page);
                prop_assert_eq!(left.len(), bytes.len() - first);
                decode_words(&mut left, WordBase::PagePresent, &mut back).expect("decode");
                prop_assert!(back == next && left.is_empty());
                // Every byte of room is counted.
                let mut out = Vec::new();
                prop_assert!(encode_words(&page, present, first, &mut out));
                prop_assert!(!encode_words(&page, present, first - 1, &mut Vec::new()));
            }
        }

        #[test]
        fn garbage_is_an_error_or_a_page(garbage in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut page = vec![0; PAGE_BYTES];
            let mut left = &garbage[..];
            while decode_words(&mut left, WordBase::WordBefore, &mut page).is_ok() {}
            prop_assert!(left.len() <= garbage.len());
        }
    }

    #[test]
    fn what_hardly_differs_is_short() {
        let size = |page: &[u8], present: Option<&[u8]>| {
            let mut out = Vec::new();
            assert!(encode_words(page, present, PAGE_BYTES, &mut out));
            out.len()
        };
        let same = page_of(&[(7, 512)]);
        let mut written = same.clone();
        written[4088] = 1;
        assert_eq!((size(&same, None), size(&same, Some(&same))), (17, 1));
        assert_eq!((size(&written, None), size(&written, Some(&same))), (33, 17));
    }
}
