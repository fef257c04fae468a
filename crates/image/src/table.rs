//! The radix page table: built bottom-up from a flat list of entries, and read
//! back into one.

use crate::{Entry, ImageError};
use dewar_units::PAGE_BYTES;
use rustc_hash::FxHashSet;

/// Entries in a node, which is one page.
pub const ENTRIES_PER_NODE: usize = 512;

/// Nodes that are read before it is looked what is in them.
const NODES_AT_A_TIME: usize = 4096;

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

/// A page table as it was read: the entries of all its levels.
#[derive(Debug)]
pub(crate) struct Table {
    /// The entries that lead to the nodes of each level, from the root's own
    /// down; the last are those of pages.
    levels: Vec<Vec<Entry>>,
}

impl Table {
    /// One entry a page.
    pub(crate) fn entries(&self) -> &[Entry] {
        self.levels.last().map_or(&[], Vec::as_slice)
    }

    /// One entry a page, without the nodes.
    pub(crate) fn into_entries(mut self) -> Vec<Entry> {
        self.levels.pop().unwrap_or_default()
    }

    /// The entry of node `index`, `height` levels above the leaf nodes, if it
    /// holds exactly `content`.
    fn node_with(&self, height: usize, index: usize, content: &[Entry]) -> Option<Entry> {
        let below = self.levels.len().checked_sub(height + 1)?;
        let above = below.checked_sub(1)?;
        let held = self.levels[below].chunks(ENTRIES_PER_NODE).nth(index)?;
        (held == content).then(|| self.levels[above][index])
    }
}

/// A table that was built.
#[derive(Debug)]
pub(crate) struct Built {
    /// The root's entry.
    pub root: Entry,
    /// The entries of nodes that were taken over from the parent.
    pub reused: Vec<Entry>,
}

/// Stores nodes, and returns the entry of each.
type PutNodes<'a> = dyn FnMut(&[Vec<u8>]) -> Result<Vec<Entry>, ImageError> + 'a;

/// Fetches the nodes that these entries name.
type GetNodes<'a> = dyn FnMut(&[Entry]) -> Result<Vec<Vec<u8>>, ImageError> + 'a;

/// Builds the table over `entries`: `put` stores new nodes of a level and
/// returns the entry of each. Nodes that `parent` holds already are shared.
pub(crate) fn build(
    entries: Vec<Entry>,
    parent: Option<&Table>,
    put: &mut PutNodes<'_>,
) -> Result<Built, ImageError> {
    let mut below = entries;
    let mut reused = Vec::new();
    for height in 0..levels_for(below.len() as u64) as usize {
        let mut level = Vec::with_capacity(below.len().div_ceil(ENTRIES_PER_NODE));
        let (mut new, mut places) = (Vec::new(), Vec::new());
        for (index, content) in below.chunks(ENTRIES_PER_NODE).enumerate() {
            if content.iter().all(|entry| *entry == Entry::ZERO) {
                level.push(Entry::ZERO);
                continue;
            }
            match parent.and_then(|parent| parent.node_with(height, index, content)) {
                Some(known) => {
                    reused.push(known);
                    level.push(known);
                }
                None => {
                    places.push(level.len());
                    new.push(node(content));
                    level.push(Entry::UNSET);
                }
            }
        }
        let stored = put(&new)?;
        if stored.len() != places.len() {
            return Err(ImageError::damaged("the page table", "a node was not stored"));
        }
        for (place, entry) in places.into_iter().zip(stored) {
            level[place] = entry;
        }
        below = level;
    }
    Ok(Built { root: below.first().copied().unwrap_or(Entry::ZERO), reused })
}

/// The bytes of a node.
fn node(entries: &[Entry]) -> Vec<u8> {
    let mut bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.0.to_le_bytes()).collect();
    bytes.resize(PAGE_BYTES, 0);
    bytes
}

/// Reads the table of `pages` pages under `root`. `get` fetches nodes.
pub(crate) fn read(root: Entry, pages: u64, get: &mut GetNodes<'_>) -> Result<Table, ImageError> {
    let mut levels = Vec::new();
    let mut level = vec![root];
    for height in (0..levels_for(pages)).rev() {
        let span = (ENTRIES_PER_NODE as u64).pow(height);
        let count = pages.div_ceil(span) as usize;
        let mut below = Vec::with_capacity(count);
        let stored: Vec<Entry> = level.iter().copied().filter(|it| *it != Entry::ZERO).collect();
        // Of no writer: a small one could claim to be of any size.
        let mut seen = FxHashSet::default();
        if !stored.iter().all(|entry| seen.insert(*entry)) {
            return Err(ImageError::damaged("the page table", "a node is in two places"));
        }
        let mut nodes = get(&stored)?.into_iter();
        for &entry in &level {
            let room = ENTRIES_PER_NODE.min(count - below.len());
            if entry == Entry::ZERO {
                below.resize(below.len() + room, Entry::ZERO);
                continue;
            }
            let node = nodes.next().unwrap_or_default();
            let mut entries = entries_of(&node);
            let before = below.len();
            below.extend(entries.by_ref().take(room));
            if below.len() != before + room || entries.any(|entry| entry != Entry::ZERO) {
                return Err(ImageError::damaged("the page table", "a node reaches past the RAM"));
            }
        }
        levels.push(std::mem::replace(&mut level, below));
    }
    levels.push(level);
    Ok(Table { levels })
}

/// Tells `visit` the entries in the nodes under `root`, level by level, but for nodes in
/// `seen`, by height: what is below those was told before.
pub(crate) fn visit(
    root: Entry,
    pages: u64,
    seen: &mut FxHashSet<(u32, Entry)>,
    get: &mut GetNodes<'_>,
    visit: &mut dyn FnMut(&[Entry]),
) -> Result<(), ImageError> {
    let mut level = vec![root];
    visit(&level);
    for height in (0..levels_for(pages)).rev() {
        level.retain(|entry| *entry != Entry::ZERO && seen.insert((height, *entry)));
        let span = (ENTRIES_PER_NODE as u64).pow(height);
        let most = pages.div_ceil(span).next_multiple_of(ENTRIES_PER_NODE as u64);
        let mut below = Vec::new();
        for nodes in level.chunks(NODES_AT_A_TIME) {
            get(nodes)?.iter().for_each(|node| below.extend(entries_of(node)));
            if below.len() as u64 > most {
                return Err(ImageError::damaged("the page table", "a node reaches past the RAM"));
            }
        }
        level = below;
        visit(&level);
    }
    Ok(())
}

/// The entries in a node.
fn entries_of(node: &[u8]) -> impl Iterator<Item = Entry> {
    node.chunks_exact(8).map(|word| Entry(u64::from_le_bytes(word.try_into().unwrap_or_default())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageAddress;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn round_trip(entries: &[Entry]) -> (Vec<Entry>, usize) {
        let mut nodes: Vec<Vec<u8>> = Vec::new();
        let built = build(entries.to_vec(), None, &mut |level| {
            let first = nodes.len();
            nodes.extend_from_slice(level);
            let address = |n: usize| PageAddress { segment: n as u64, frame: 7, index: 3 };
            Ok((first..nodes.len()).map(|n| Entry::packed(address(n))).collect())
        })
        .expect("build");
        let node = |entry: &Entry| {
            let at = entry.packed_at().expect("packed");
            nodes[at.segment as usize].clone()
        };
        let back =
            read(built.root, entries.len() as u64, &mut |some| Ok(some.iter().map(node).collect()));
        (back.expect("read").entries().to_vec(), nodes.len())
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
    fn a_changed_page_costs_the_nodes_above_it() {
        let address = |n: u64| Entry::packed(PageAddress { segment: n, frame: 7, index: 3 });
        let entries: Vec<Entry> = (1..=300_000).map(address).collect();
        let mut nodes: Vec<Vec<u8>> = Vec::new();
        let mut put = |level: &[Vec<u8>]| {
            let first = nodes.len() as u64;
            nodes.extend_from_slice(level);
            Ok((first..nodes.len() as u64).map(address).collect())
        };
        let first = build(entries.clone(), None, &mut put).expect("build");
        assert_eq!(first.reused, []);
        let count = nodes.len();
        let node =
            |entry: &Entry| nodes[entry.packed_at().expect("packed").segment as usize].clone();
        let mut get = |some: &[Entry]| Ok(some.iter().map(node).collect());
        let table = read(first.root, entries.len() as u64, &mut get).expect("read");
        let same = build(entries.clone(), Some(&table), &mut |new| {
            assert_eq!(new.len(), 0);
            Ok(Vec::new())
        });
        assert_eq!(same.expect("build").root, first.root);

        let mut changed = entries.clone();
        changed[280_000] = Entry::ZERO;
        let mut new = 0;
        let built = build(changed, Some(&table), &mut |level| {
            new += level.len();
            Ok(level.iter().map(|_| address(1 << 30)).collect())
        });
        assert_eq!(new, 3, "one node a level");
        assert_eq!(built.expect("build").reused.len(), count - 3);
    }

    #[test]
    fn what_two_tables_share_is_visited_once() {
        let address = |n: u64| Entry::packed(PageAddress { segment: n, frame: 7, index: 3 });
        let mut nodes: Vec<Vec<u8>> = Vec::new();
        let mut entries: Vec<Entry> = (1..=300_000).map(address).collect();
        let mut roots = Vec::new();
        let mut parent = None;
        for changed in [0, 280_000] {
            entries[changed] = address(400_000 + changed as u64);
            let mut put = |level: &[Vec<u8>]| {
                let first = nodes.len() as u64;
                nodes.extend_from_slice(level);
                Ok((first..nodes.len() as u64).map(address).collect())
            };
            let root = build(entries.clone(), parent.as_ref(), &mut put).expect("build").root;
            let mut get = |some: &[Entry]| {
                Ok(some
                    .iter()
                    .map(|it| nodes[it.packed_at().expect("at").segment as usize].clone())
                    .collect())
            };
            parent = Some(read(root, entries.len() as u64, &mut get).expect("read"));
            roots.push(root);
        }
        let mut seen = FxHashSet::default();
        let mut report = Vec::new();
        for root in roots {
            let (mut read, mut all) = (0, HashSet::new());
            let mut get = |some: &[Entry]| {
                read += some.len();
                Ok(some
                    .iter()
                    .map(|it| nodes[it.packed_at().expect("at").segment as usize].clone())
                    .collect())
            };
            let mut note = |level: &[Entry]| all.extend(level.iter().copied());
            visit(root, entries.len() as u64, &mut seen, &mut get, &mut note).expect("visit");
            report.push((read, all));
        }
        assert_eq!(report[1].0, 3, "one node a level");
        let all: HashSet<Entry> = report.iter().flat_map(|(_, all)| all.iter().copied()).collect();
        assert!(entries.iter().all(|entry| all.contains(entry)));
        assert!(report[1].1.contains(&address(680_000)));
    }

    #[test]
    fn an_empty_guest_needs_no_node() {
        assert_eq!(round_trip(&[Entry::ZERO; 5000]), (vec![Entry::ZERO; 5000], 0));
    }

    #[test]
    fn a_node_that_reaches_past_the_ram_is_refused() {
        let full = [1u8; PAGE_BYTES];
        assert!(read(Entry(1), 5, &mut |_| Ok(vec![full.to_vec()])).is_err());
    }
}
