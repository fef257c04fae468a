use crate::lease::WriterLease;
use crate::{Blob, Entry, ImageError, PageCounts, Place, StoreError};
use dewar_units::{PageNumber, PageSet};
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::Arc;

/// What threads that write an image share.
pub(super) struct Shared {
    pub(super) lease: Option<WriterLease>,
    /// Numbers for segments, noted in the lease.
    pub(super) free: VecDeque<u64>,
    pub(super) used: Vec<u64>,
    /// Segments of other images that the page table leads to.
    pub(super) inherited: BTreeSet<u64>,
    /// Pages that were put into the dirty store, perhaps replaced since.
    pub(super) keyed: PageSet,
    /// The pages, with their seals, that the page table leads to in each source.
    pub(super) sources: BTreeMap<u32, Vec<(PageNumber, u64)>>,
    /// Segments and frames that are stored as they are.
    pub(super) raw: HashSet<(u64, u16)>,
    pub(super) stored_bytes: u64,
    /// The fingerprints, stored.
    pub(super) prints: Option<Blob>,
    /// Why a segment could not be written.
    pub(super) failure: Option<Arc<ImageError>>,
}

impl Shared {
    pub(super) fn new(lease: WriterLease, pages: u64) -> Self {
        Self {
            lease: Some(lease),
            free: VecDeque::new(),
            used: Vec::new(),
            inherited: BTreeSet::new(),
            keyed: PageSet::new(pages),
            sources: BTreeMap::new(),
            raw: HashSet::new(),
            stored_bytes: 0,
            prints: None,
            failure: None,
        }
    }

    pub(super) fn note(&mut self, names: &[String]) -> Result<(), StoreError> {
        self.lease.as_mut().map_or(Ok(()), |lease| lease.note(names))
    }

    /// Counts pages by kind, and notes where those of other images lie; `parents` are
    /// the parent's entries, `own_source` is our own part of the dirty store.
    pub(super) fn count(
        &mut self,
        entries: &[Entry],
        parents: &[Entry],
        own_source: Option<u32>,
    ) -> PageCounts {
        let own: HashSet<u64> = self.used.iter().copied().collect();
        let mut counts = PageCounts::default();
        // Neighbours mostly lie in one segment.
        let mut last = None;
        for (page, entry) in entries.iter().enumerate() {
            let others = match parents.get(page) == Some(entry) {
                true => &mut counts.inherited,
                false => &mut counts.shared,
            };
            let at = match entry.place() {
                Ok(Place::Packed(at)) => at,
                Ok(Place::Keyed(at)) => {
                    let page = PageNumber(page as u64);
                    self.sources.entry(at.source).or_default().push((page, at.seal));
                    match own_source == Some(at.source) {
                        true => counts.keyed += 1,
                        false => *others += 1,
                    }
                    continue;
                }
                Ok(Place::Zeros) | Err(_) => {
                    counts.zero += 1;
                    continue;
                }
            };
            let is_own = match last {
                Some((segment, is_own)) if segment == at.segment => is_own,
                _ => own.contains(&at.segment),
            };
            if last != Some((at.segment, is_own)) {
                last = Some((at.segment, is_own));
                if !is_own {
                    self.inherited.insert(at.segment);
                }
            }
            match is_own {
                false => *others += 1,
                true if self.raw.contains(&(at.segment, at.frame)) => counts.raw += 1,
                true => counts.compressed += 1,
            }
        }
        counts
    }

    pub(super) fn inherit(&mut self, entries: &[Entry]) {
        let segments = entries.iter().filter_map(|entry| Some(entry.packed_at()?.segment));
        self.inherited.extend(segments);
    }
}
