//! The radix page table: built bottom-up from a flat list of entries, and read
//! back into one.

use crate::{Entry, ImageError};
use dewar_units::PAGE_BYTES;

/// Entries in a node, which is one page.
pub const ENTRIES_PER_NODE: usize = 512;

/// How many levels of nodes stand above `pages` entries; at least one.
pub(crate) fn levels_for(pages: u64) -> u32 {
    let mut levels = 1;
    let mut reach = ENTRIES_PER_NODE as u64;
    while reach < pages {
        reach = reach.saturating_mul(ENTRIES_PER_NODE as u64);
        levels += 1;
    }
    levels
}

/// Builds the table over `entries`: `put` stores all nodes of a level and
/// returns the entry of each. Returns the root's entry.
pub(crate) fn build(
    entries: Vec<Entry>,
    mut put: impl FnMut(&[Vec<u8>]) -> Result<Vec<Entry>, ImageError>,
) -> Result<Entry, ImageError> {
    let mut below = entries;
    for _ in 0..levels_for(below.len() as u64) {
        let nodes: Vec<Option<Vec<u8>>> = below.chunks(ENTRIES_PER_NODE).map(node).collect();
        let stored: Vec<Vec<u8>> = nodes.iter().flatten().cloned().collect();
        let mut addresses = put(&stored)?.into_iter();
        below = nodes
            .iter()
            .map(|node| match node {
                Some(_) => addresses
                    .next()
                    .ok_or_else(|| ImageError::damaged("the page table", "a node was not stored")),
                None => Ok(Entry::ZERO),
            })
            .collect::<Result<_, _>>()?;
    }
    Ok(below.first().copied().unwrap_or(Entry::ZERO))
}

/// The bytes of a node, or nothing where all its pages are zeros.
fn node(entries: &[Entry]) -> Option<Vec<u8>> {
    if entries.iter().all(|entry| *entry == Entry::ZERO) {
        return None;
    }
    let mut bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.0.to_le_bytes()).collect();
    bytes.resize(PAGE_BYTES, 0);
    Some(bytes)
}

/// Reads the table under `root` into a flat list of `pages` entries. `get`
/// fetches a node.
pub(crate) fn flatten(
    root: Entry,
    pages: u64,
    mut get: impl FnMut(Entry) -> Result<Vec<u8>, ImageError>,
) -> Result<Vec<Entry>, ImageError> {
    let mut level = vec![root];
    for height in (0..levels_for(pages)).rev() {
        let span = (ENTRIES_PER_NODE as u64).pow(height);
        let count = pages.div_ceil(span) as usize;
        let mut below = Vec::with_capacity(count);
        for entry in level {
            let room = ENTRIES_PER_NODE.min(count - below.len());
            if entry == Entry::ZERO {
                below.resize(below.len() + room, Entry::ZERO);
                continue;
            }
            let node = get(entry)?;
            let mut entries = node.chunks_exact(8).map(|entry| {
                Entry(entry.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)))
            });
            below.extend(entries.by_ref().take(room));
            if entries.any(|entry| entry != Entry::ZERO) {
                return Err(ImageError::damaged("the page table", "a node reaches past the RAM"));
            }
        }
        level = below;
    }
    Ok(level)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageAddress;
    use proptest::prelude::*;

    fn round_trip(entries: &[Entry]) -> (Vec<Entry>, usize) {
        let mut nodes: Vec<Vec<u8>> = Vec::new();
        let root = build(entries.to_vec(), |level| {
            let first = nodes.len();
            nodes.extend_from_slice(level);
            let address = |n: usize| PageAddress { segment: n as u64, frame: 7, index: 3 };
            Ok((first..nodes.len()).map(|n| Entry::packed(address(n))).collect())
        })
        .expect("build");
        let back = flatten(root, entries.len() as u64, |entry| {
            let at = entry.address().expect("kind").expect("packed");
            Ok(nodes[at.segment as usize].clone())
        });
        (back.expect("flatten"), nodes.len())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn tables_come_back(
            pages in prop_oneof![1usize..1030, 262_000usize..262_300],
            marks in prop::collection::vec((any::<prop::sample::Index>(), 1u64..1 << 39), 0..40),
        ) {
            let mut entries = vec![Entry::ZERO; pages];
            for (at, segment) in marks {
                *at.get_mut(&mut entries) = Entry::packed(PageAddress { segment, frame: 1, index: 2 });
            }
            prop_assert_eq!(round_trip(&entries).0, entries);
        }
    }

    #[test]
    fn an_empty_guest_needs_no_node() {
        assert_eq!(round_trip(&[Entry::ZERO; 5000]), (vec![Entry::ZERO; 5000], 0));
    }

    #[test]
    fn a_node_that_reaches_past_the_ram_is_refused() {
        let full = [1u8; PAGE_BYTES];
        assert!(flatten(Entry(1), 5, |_| Ok(full.to_vec())).is_err());
    }
}
