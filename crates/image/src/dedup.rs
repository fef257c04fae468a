//! Pages with the same content, stored once.
//!
//! **Within an image and its ancestors** XXH3-128 finds a candidate and a
//! byte-for-byte compare with what is stored decides: a guest that makes two pages
//! with one hash gains nothing. To compare, the candidate's frame is read back, so
//! this pays where neighbours are copied together; a budget ends it where it does
//! not. An image remembers the fingerprints of the pages that it stored itself,
//! for those of its guest that are taken on top of it.
//!
//! **Across a store** there is no reading back: BLAKE3 (192 bits of it) decides,
//! and a new image looks among the pages of the newest images that were taken so. A
//! guest whose checkpoint turns out small learns that another guest has the same page: this is a side
//! channel, so it is asked for, never the default.
//!
//! **What is found must stay.** The collector drops frames that no image's table
//! leads to, and a page that was replaced before its image was complete may lie in
//! such a frame. So an image remembers only pages in frames that it needs itself
//! (and says so, [`Record::findable`]), and while a writer may find them it cannot be
//! deleted.

use crate::{Blob, Entry, ImageError, ImageReader, PageAddress, Record, Store};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use twox_hash::XxHash3_128;

/// Where a page's content is looked for before it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dedup {
    /// Nowhere.
    #[default]
    Off,
    /// Among the pages of the image itself and of its ancestors, as far as they
    /// were taken so.
    Image,
    /// The same, by fingerprints that are proof, also for
    /// [`ImageReader::known_pages`].
    Known,
    /// Among those of the newest images in the store that were taken so, as many as there
    /// is room for in memory.
    Store,
}

/// Enough of a hash: 24 bytes.
pub(crate) type Fingerprint = [u8; 24];

const PRINT_BYTES: usize = size_of::<Fingerprint>();
/// A fingerprint and an entry, as they are stored.
pub(crate) const ROW_BYTES: usize = PRINT_BYTES + 8;
/// Most fingerprints of other images in memory: 256 MiB of them.
const MOST_ROWS: usize = (256 << 20) / ROW_BYTES;
/// Most images whose fingerprints are looked through: each is held meanwhile.
const MOST_IMAGES: usize = 64;
const SHARDS: usize = 64;

/// What is known of stored pages, for all threads of a writer.
pub(crate) struct Fingerprints {
    mode: Dedup,
    own: Vec<Mutex<HashMap<Fingerprint, PageAddress>>>,
    others: Vec<Rows>,
    /// Those that were stored though another with their print was, where all shall
    /// be known.
    again: Mutex<Vec<(Fingerprint, PageAddress)>>,
    duplicates: AtomicU64,
}

/// The fingerprints of an image, in order, and what keeps it from being deleted.
struct Rows {
    bytes: Vec<u8>,
    /// The image's segments, and whether they were found to be the ones that it names.
    image: ImageReader,
    found: Mutex<HashMap<u64, bool>>,
}

impl Fingerprints {
    /// For a new image in `store` on top of `parent`; `None` where nothing shall be
    /// looked for.
    pub(crate) fn new(
        store: &Store,
        mode: Dedup,
        parent: Option<&ImageReader>,
    ) -> Result<Option<Self>, ImageError> {
        let is_ancestor = |record: &Record| parent.is_some_and(|it| is_below(record, it.record()));
        let others = match mode {
            Dedup::Off => return Ok(None),
            Dedup::Image => {
                rows_of(store, |it| it.candidates.as_ref().filter(|_| is_ancestor(it)))?
            }
            Dedup::Known => rows_of(store, |it| it.prints().filter(|_| is_ancestor(it)))?,
            Dedup::Store => rows_of(store, |it| it.fingerprints.as_ref())?,
        };
        let own = (0..SHARDS).map(|_| Mutex::default()).collect();
        Ok(Some(Self { mode, own, others, again: Mutex::default(), duplicates: AtomicU64::new(0) }))
    }

    /// Whether equal fingerprints are proof enough.
    pub(crate) fn is_proof(&self) -> bool {
        matches!(self.mode, Dedup::Known | Dedup::Store)
    }

    /// Where they are looked for, and who may look for the image's own.
    pub(crate) fn mode(&self) -> Dedup {
        self.mode
    }

    pub(crate) fn of(&self, page: &[u8]) -> Fingerprint {
        if self.is_proof() {
            return proof(page);
        }
        let mut print = [0; PRINT_BYTES];
        print[..16].copy_from_slice(&XxHash3_128::oneshot(page).to_le_bytes());
        print
    }

    /// Where a page with this fingerprint lies.
    pub(crate) fn find(&self, print: &Fingerprint) -> Option<PageAddress> {
        let own = self.shard(print).get(print).copied();
        own.or_else(|| self.others.iter().find_map(|rows| rows.find(print)))
    }

    /// Says that a page was stored; returns whether it is the first with this
    /// print. The first is remembered.
    pub(crate) fn learn(&self, print: Fingerprint, at: PageAddress) -> bool {
        let is_first = *self.shard(&print).entry(print).or_insert(at) == at;
        if !is_first && self.mode == Dedup::Known {
            self.again.lock().unwrap_or_else(|locked| locked.into_inner()).push((print, at));
        }
        is_first
    }

    /// Says that a page need not be stored.
    pub(crate) fn count_duplicate(&self) {
        self.duplicates.fetch_add(1, Ordering::Relaxed);
    }

    /// How many pages need not be stored.
    pub(crate) fn duplicates(&self) -> u64 {
        self.duplicates.load(Ordering::Relaxed)
    }

    /// What an image with this page table remembers.
    pub(crate) fn to_bytes(&self, table: &[Entry]) -> Vec<u8> {
        let place = |at: PageAddress| (at.segment, at.frame);
        let needed: HashSet<_> =
            table.iter().filter_map(|entry| entry.packed_at()).map(place).collect();
        let mut rows: Vec<(Fingerprint, PageAddress)> = Vec::new();
        for shard in &self.own {
            let shard = shard.lock().unwrap_or_else(|locked| locked.into_inner());
            rows.extend(shard.iter().map(|(print, at)| (*print, *at)));
        }
        rows.extend(self.again.lock().unwrap_or_else(|locked| locked.into_inner()).iter());
        rows.retain(|(_, at)| needed.contains(&place(*at)));
        rows.sort_unstable();
        let row = |(print, at): (Fingerprint, PageAddress)| {
            print.into_iter().chain(Entry::packed(at).0.to_le_bytes())
        };
        rows.into_iter().flat_map(row).collect()
    }

    fn shard(&self, print: &Fingerprint) -> MutexGuard<'_, HashMap<Fingerprint, PageAddress>> {
        let shard = &self.own[usize::from(print[0]) % SHARDS];
        shard.lock().unwrap_or_else(|locked| locked.into_inner())
    }
}

/// A fingerprint that nobody can make two pages for.
pub(crate) fn proof(page: &[u8]) -> Fingerprint {
    let mut print = [0; PRINT_BYTES];
    print.copy_from_slice(&blake3::hash(page).as_bytes()[..PRINT_BYTES]);
    print
}

/// The print and the entry of a stored row.
pub(crate) fn row(bytes: &[u8]) -> (Fingerprint, Entry) {
    let mut print = [0; PRINT_BYTES];
    print.copy_from_slice(&bytes[..PRINT_BYTES]);
    let word = &bytes[PRINT_BYTES..ROW_BYTES];
    (print, Entry(word.iter().rev().fold(0, |all, &byte| (all << 8) | u64::from(byte))))
}

impl Rows {
    /// Whether a segment is there and is the one that the image names.
    fn is_right(&self, segment: u64) -> bool {
        let mut found = self.found.lock().unwrap_or_else(|locked| locked.into_inner());
        *found.entry(segment).or_insert_with(|| self.image.segment(segment).is_ok())
    }

    fn find(&self, print: &Fingerprint) -> Option<PageAddress> {
        let row = |index: usize| row(&self.bytes[index * ROW_BYTES..]);
        let (mut low, mut high) = (0, self.bytes.len() / ROW_BYTES);
        while low < high {
            let middle = (low + high) / 2;
            let (found, entry) = row(middle);
            match found.cmp(print) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => {
                    return entry.packed_at().filter(|at| self.is_right(at.segment));
                }
            }
        }
        None
    }
}

/// Whether an image is one of those that a child of `parent` stands on: the same
/// guest's, and `parent` shares what it stored.
fn is_below(record: &Record, parent: &Record) -> bool {
    record.guest == parent.guest
        && record
            .segments
            .iter()
            .any(|it| record.shares(*it, parent) && parent.all_segments().any(|other| other == *it))
}

/// The fingerprints that the images in a store remember in a blob, newest first,
/// as far as memory shall hold them. Images that cannot be read are as good as not
/// there.
fn rows_of(
    store: &Store,
    blob: impl Fn(&Record) -> Option<&Blob>,
) -> Result<Vec<Rows>, ImageError> {
    let (records, _) = store.records()?;
    let mut found = Vec::new();
    let mut left = MOST_ROWS;
    for record in records.iter().rev().filter(|record| record.findable) {
        if found.len() == MOST_IMAGES {
            break;
        }
        let Some(blob) = blob(record) else { continue };
        let rows = blob.bytes as usize / ROW_BYTES;
        if rows > left {
            continue;
        }
        let load = || -> Result<Rows, ImageError> {
            let image = store.open_image(&record.id)?;
            let bytes = image.blob("list of fingerprints", blob)?;
            Ok(Rows { bytes, image, found: Mutex::default() })
        };
        if let Ok(rows_found) = load() {
            left -= rows;
            found.push(rows_found);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FrameCache, ImageOptions, Location};
    use dewar_codec::{Codec, Compression};
    use dewar_units::{PAGE_BYTES, PageNumber};

    #[test]
    fn a_page_with_anothers_hash_is_not_taken_for_it() {
        let folder = tempfile::tempdir().expect("tempdir");
        let store = Store::open_or_create(&Location::Folder(folder.path().join("s")));
        let store = store.expect("store");
        let options = ImageOptions {
            pages: 2,
            compression: Compression::Only(Codec::Zstd),
            level: 1,
            dedup: Dedup::Image,
        };
        let writer = store.begin(options, None).expect("begin");
        let (one, two) = ([1; PAGE_BYTES], [2; PAGE_BYTES]);
        let mut sink = writer.sink().expect("sink");
        sink.put(PageNumber(0), &one).expect("put");
        sink.flush().expect("flush");
        // What a guest would have to make: two pages with one hash.
        let prints = writer.fingerprints().expect("fingerprints");
        let at = prints.find(&prints.of(&one)).expect("stored");
        prints.learn(prints.of(&two), at);
        sink.put(PageNumber(1), &two).expect("put");
        sink.finish().expect("finish");
        let (root, counts) = writer.finish_memory(0).expect("table");
        let (state, hot) =
            (writer.put_blob(&[]).expect("blob"), writer.put_blob(&[]).expect("blob"));
        let regions = vec![crate::RegionRecord { name: "ram".into(), pages: 2 }];
        let memory = crate::MemoryRecord { pages: 2, root, regions, counts };
        let record = crate::Record::new("g", memory, state, hot);
        let record = writer.commit(record, vec![]).expect("commit");
        let image = store.open_image(&record.id).expect("open");
        let mut cache = FrameCache::new().expect("cache");
        let entries = image.entries().expect("entries");
        let page = image.page(PageNumber(1), entries[1], &mut cache).expect("page");
        assert_eq!(page.expect("not zeros"), two);
    }
}
