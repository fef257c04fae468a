//! A dirty store: pages kept one by one, by their numbers, in a store beside
//! that of the image.
//!
//! While the bulk pass writes segments in order, pages that the guest writes
//! meanwhile go here, where a newer version takes the place of an older one.
//! Entries of kind *keyed* lead to them. An image's record names its *sources*:
//! the dirty stores and images whose pages it has. An image on top of it shares
//! the nodes with such entries, so a source keeps its number in all of them.
//!
//! Each page's value says which page of which image of which store it is, by its
//! checksum, and the entry has the beginning of that checksum: so a version before
//! the last (a server that came back from an older snapshot, a command that arrived
//! late) is known. `docs/image-format.md` gives the bytes.

use crate::entry::SEAL_MASK;
use crate::table::ENTRIES_PER_NODE;
use crate::{Entry, ImageError, ImageId, ImageWriter, KeyedAddress, StoreError};
use dewar_codec::{Codec, FrameDecoder, FrameEncoder, PageCodec, PageKind, classify};
use dewar_store::Location;
use dewar_store::Redis;
use dewar_store::{PagePlace, Slot};
use dewar_units::{PAGE_BYTES, PageNumber};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use twox_hash::XxHash3_128;

const LEAF_PAGES: u64 = ENTRIES_PER_NODE as u64;
/// Pages that are put or asked for by one command, at most.
const BATCH: usize = 128;
const VERSION: u8 = 1;
const CHECKSUM_AT: usize = 4;
const HEADER_BYTES: usize = 20;

/// Where an image's pages lie one by one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KeyedSource {
    /// The dirty store.
    pub store: String,
    /// The image that put them there.
    pub image: ImageId,
}

/// A store that can keep pages one by one.
#[derive(Debug, Clone)]
pub struct DirtyStore {
    place: Arc<dyn PagePlace>,
}

impl DirtyStore {
    /// Connects to it.
    ///
    /// # Errors
    /// [`StoreError::Unfit`] where it cannot keep pages by their numbers or may
    /// forget them; where it does not answer.
    pub fn open(location: &Location) -> Result<Self, ImageError> {
        let Location::Redis(place) = location else {
            let problem = "a dirty store keeps pages one by one: use redis://HOST".to_owned();
            return Err(StoreError::Unfit { store: location.to_string(), problem }.into());
        };
        let redis = Redis::connect(place)?;
        redis.require_no_eviction()?;
        Ok(Self { place: Arc::new(redis) })
    }

    /// What it is called, without anything secret.
    pub fn url(&self) -> &str {
        self.place.url()
    }
}

/// The pages of one image in a dirty store.
#[derive(Debug)]
pub(crate) struct KeyedPages {
    place: Arc<dyn PagePlace>,
    owner: String,
}

impl KeyedPages {
    pub(crate) fn new(store: DirtyStore, store_id: &str, image: &ImageId) -> Self {
        Self { place: store.place, owner: owner(store_id, image) }
    }

    /// `patience` bounds how long is tried again what fails.
    pub(crate) fn open(
        source: &KeyedSource,
        store_id: &str,
        patience: Duration,
    ) -> Result<Self, ImageError> {
        let place = connect(&source.store, patience)?;
        Ok(Self { place, owner: owner(store_id, &source.image) })
    }

    pub(crate) fn source(&self, image: &ImageId) -> KeyedSource {
        KeyedSource { store: self.place.url().to_owned(), image: image.clone() }
    }

    pub(crate) fn begin(&self, pages: u64) -> Result<(), StoreError> {
        self.place.begin_pages(&self.owner, pages.div_ceil(LEAF_PAGES))
    }

    /// Reads pages, in ascending order of their numbers, one after the other
    /// into `out`.
    pub(crate) fn get(
        &self,
        pages: &[(PageNumber, u64)],
        decoder: &mut FrameDecoder,
        out: &mut Vec<u8>,
    ) -> Result<(), ImageError> {
        out.clear();
        let mut expanded = Vec::new();
        let by_leaf = pages.chunk_by(|(a, _), (b, _)| leaf(*a) == leaf(*b));
        for group in by_leaf.flat_map(|it| it.chunks(BATCH)) {
            let slots: Vec<Slot> = group.iter().map(|(page, _)| slot(*page)).collect();
            let values = self.place.get_pages(&self.owner, leaf(group[0].0), &slots)?;
            for ((page, seal), value) in group.iter().zip(values) {
                let damaged = |problem: &str| ImageError::damaged(self.place(*page), problem);
                let value = value.ok_or_else(|| damaged("it is not there any more"))?;
                let (codec, payload) = self.parse(*page, *seal, &value).map_err(damaged)?;
                decoder
                    .decode(codec, payload, PAGE_BYTES, &mut expanded)
                    .map_err(|error| damaged(&error.to_string()))?;
                out.extend_from_slice(&expanded);
            }
        }
        Ok(())
    }

    /// That pages, in ascending order of their numbers, are there as they were put last.
    pub(crate) fn require(&self, pages: &[(PageNumber, u64)]) -> Result<(), ImageError> {
        for group in pages.chunk_by(|(a, _), (b, _)| leaf(*a) == leaf(*b)) {
            let slots: Vec<Slot> = group.iter().map(|(page, _)| slot(*page)).collect();
            let heads =
                self.place.page_heads(&self.owner, leaf(group[0].0), &slots, HEADER_BYTES)?;
            let found = heads.iter().map(|head| {
                let checksum = head.as_ref()?.get(CHECKSUM_AT..HEADER_BYTES)?;
                Some(seal(u128::from_le_bytes(checksum.try_into().ok()?)))
            });
            if let Some(((page, _), _)) =
                group.iter().zip(found).find(|((_, sealed), found)| *found != Some(*sealed))
            {
                return Err(ImageError::damaged(self.place(*page), "the store has lost it"));
            }
        }
        Ok(())
    }

    /// A page as it is told of.
    fn place(&self, page: PageNumber) -> String {
        format!("page {page} ({} of {})", self.owner, self.place.url())
    }

    /// Forgets pages, in ascending order of their numbers.
    pub(crate) fn forget(&self, pages: &[PageNumber]) -> Result<(), StoreError> {
        for group in pages.chunk_by(|a, b| leaf(*a) == leaf(*b)) {
            let slots: Vec<Slot> = group.iter().map(|page| slot(*page)).collect();
            self.place.forget_pages(&self.owner, leaf(group[0]), &slots)?;
        }
        Ok(())
    }

    pub(crate) fn remove_all(&self) -> Result<(), StoreError> {
        self.place.remove_pages(&self.owner)
    }

    /// A page's value and its seal.
    fn value(&self, page: PageNumber, codec: Codec, payload: &[u8]) -> (Vec<u8>, u64) {
        let mut value = vec![VERSION, codec as u8, 0, 0];
        let checksum = self.checksum(page, &value, payload);
        value.extend(checksum.to_le_bytes());
        value.extend_from_slice(payload);
        (value, seal(checksum))
    }

    fn parse<'v>(
        &self,
        page: PageNumber,
        sealed: u64,
        value: &'v [u8],
    ) -> Result<(Codec, &'v [u8]), &'static str> {
        let (header, payload) = value.split_at_checked(HEADER_BYTES).ok_or("it is cut short")?;
        let (head, checksum) = header.split_at(CHECKSUM_AT);
        let found = self.checksum(page, head, payload);
        if found.to_le_bytes() != checksum {
            return Err("its checksum does not fit");
        }
        if seal(found) != sealed {
            return Err("the store gives another version of it");
        }
        match (head[0], Codec::from_number(head[1])) {
            (VERSION, Some(codec)) => Ok((codec, payload)),
            _ => Err("a newer Dewar put it there"),
        }
    }

    /// Over all that says which page it is, and its bytes.
    fn checksum(&self, page: PageNumber, head: &[u8], payload: &[u8]) -> u128 {
        let mut hasher = XxHash3_128::new();
        hasher.write(self.owner.as_bytes());
        hasher.write(&page.0.to_le_bytes());
        hasher.write(head);
        hasher.write(payload);
        hasher.finish_128()
    }
}

/// One thread's way into a dirty store. A page that is put again replaces the
/// one before, if that one's sink was flushed in between.
pub struct KeyedSink<'w, 's> {
    writer: &'w ImageWriter<'s>,
    pages: &'w KeyedPages,
    source: u32,
    encoder: FrameEncoder,
    payload: Vec<u8>,
    leaf: u64,
    batch: Vec<(Slot, Vec<u8>)>,
    seals: Vec<u64>,
}

impl<'w, 's> KeyedSink<'w, 's> {
    pub(crate) fn new(
        writer: &'w ImageWriter<'s>,
        pages: &'w KeyedPages,
        source: u32,
    ) -> Result<Self, ImageError> {
        Ok(Self {
            writer,
            pages,
            source,
            encoder: FrameEncoder::new(Codec::Lz4, 0),
            payload: Vec::new(),
            leaf: 0,
            batch: Vec::new(),
            seals: Vec::new(),
        })
    }

    /// Puts a page of RAM; neighbours one after the other cost less. Says
    /// whether it goes to the store: a page of zeros does not.
    ///
    /// # Errors
    /// Where the dirty store does not take it.
    pub fn put(&mut self, page: PageNumber, bytes: &[u8]) -> Result<bool, ImageError> {
        let codec = match classify(bytes) {
            PageKind::Zero => {
                self.writer.set(page.index(), Entry::ZERO);
                return Ok(false);
            }
            PageKind::Compressible => self.encoder.encode(bytes, &mut self.payload)?,
            PageKind::Incompressible => Codec::Raw,
        };
        if leaf(page) != self.leaf || self.batch.len() == BATCH {
            self.flush()?;
            self.leaf = leaf(page);
        }
        let payload = if codec == Codec::Raw { bytes } else { &self.payload };
        let (value, seal) = self.pages.value(page, codec, payload);
        self.batch.push((slot(page), value));
        self.seals.push(seal);
        Ok(true)
    }

    /// Gives every page put so far its entry.
    ///
    /// # Errors
    /// As [`KeyedSink::put`].
    pub fn flush(&mut self) -> Result<(), ImageError> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let place = &self.pages.place;
        place.put_pages(&self.pages.owner, self.leaf, &self.batch)?;
        let mut numbers = Vec::with_capacity(self.batch.len());
        for ((slot, _), seal) in self.batch.iter().zip(&self.seals) {
            let page = PageNumber(self.leaf * LEAF_PAGES + u64::from(*slot));
            let entry = Entry::keyed(KeyedAddress { source: self.source, seal: *seal });
            self.writer.set(page.index(), entry);
            numbers.push(page);
        }
        self.writer.note_keyed(&numbers);
        self.batch.clear();
        self.seals.clear();
        Ok(())
    }
}

/// What a lease says of pages that are about to be put.
pub(crate) fn lease_line(source: &KeyedSource, store_id: &str) -> String {
    format!("{LEASE_MARK}{} {}", owner(store_id, &source.image), source.store)
}

const LEASE_MARK: &str = "keyed:";

/// The owner and the dirty store of such a line.
pub(crate) fn parse_lease_line(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix(LEASE_MARK)?.split_once(' ')
}

/// Removes all pages of an owner.
pub(crate) fn remove(url: &str, owner: &str) -> Result<(), StoreError> {
    connect(url, Duration::MAX)?.remove_pages(owner)
}

/// The images of a store that have pages in a dirty store.
pub(crate) fn images_in(url: &str, store_id: &str) -> Result<Vec<ImageId>, ImageError> {
    let owners = connect(url, Duration::MAX)?.owners()?;
    let own = owners.iter().filter_map(|owner| owner.strip_prefix(store_id)?.strip_prefix('/'));
    Ok(own.map(|image| ImageId(image.to_owned())).collect())
}

pub(crate) fn owner(store_id: &str, image: &ImageId) -> String {
    format!("{store_id}/{image}")
}

/// The first of an image's pages, in ascending order, that a dirty store has lost, if it
/// answers.
pub(crate) fn first_lost(
    source: &KeyedSource,
    store_id: &str,
    pages: &[(PageNumber, u64)],
) -> Option<String> {
    let known = KeyedPages::open(source, store_id, Duration::ZERO).ok()?;
    match known.require(pages) {
        Err(ImageError::Damaged { place, .. }) => Some(place),
        _ => None,
    }
}

/// That a dirty store answers.
pub(crate) fn require(url: &str) -> Result<(), StoreError> {
    connect(url, Duration::MAX).map(drop)
}

fn connect(url: &str, patience: Duration) -> Result<Arc<dyn PagePlace>, StoreError> {
    match Location::parse(url)? {
        Location::Redis(mut place) => {
            place.retry = place.retry.min(patience);
            Ok(Arc::new(Redis::connect(&place)?))
        }
        Location::Folder(_) => {
            let problem = "it is no dirty store".to_owned();
            Err(StoreError::BadUrl { url: url.to_owned(), problem })
        }
    }
}

fn seal(checksum: u128) -> u64 {
    checksum as u64 & SEAL_MASK
}

fn leaf(page: PageNumber) -> u64 {
    page.0 / LEAF_PAGES
}

fn slot(page: PageNumber) -> Slot {
    (page.0 % LEAF_PAGES) as Slot
}
