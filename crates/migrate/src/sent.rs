//! What was sent over a connection, so that it need not be sent again.
//!
//! *The same.* For the pages of this epoch a fingerprint of each says where to look: a page whose fingerprint
//! came before may be the same as that one. Whether it is, content decides ([`SentMemory`]).
//!
//! *Versions.* Of pages that may come again a copy of what was sent is kept, and the next version is sent as
//! the words that differ. The copies are bounded; pages that come when there is no more room have none.

use dewar_codec::{Feed, encode_words};
use dewar_memory::{Ram, WriteTracker};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::collections::HashMap;

/// Fingerprints that are kept for a connection at most, of which each has one place: a newer one takes
/// it.
const MOST_FINGERPRINTS: u64 = 1 << 20;
/// A delta is sent where it has at most so many bytes. A codec leaves about as much of a page, of those
/// that it shrinks.
const MOST_DELTA_BYTES: usize = PAGE_BYTES / 8;

/// The source's memory, in which pages that were sent are looked at again.
pub trait SentMemory: Sync {
    /// Whether a page that was put in this epoch had these bytes then.
    fn had(&self, page: PageNumber, bytes: &[u8]) -> bool;

    /// Whether a copy of what is sent is worth its memory.
    fn comes_again(&self, feed: &Feed) -> bool;
}

/// A guest's memory while it runs. **A page had some bytes when it was put if it has them now and was not
/// written since writes are recorded for this epoch**: in this order, for a write is recorded before it
/// is done.
pub(crate) struct Tracked<'t> {
    pub(crate) ram: &'t Ram,
    pub(crate) tracker: &'t WriteTracker,
    /// Whether all pages are sent, of which few come again.
    pub(crate) is_first: bool,
}

impl SentMemory for Tracked<'_> {
    fn had(&self, page: PageNumber, bytes: &[u8]) -> bool {
        let one = PageRange::new(page.0, page.0 + 1);
        has(self.ram, page, bytes) && self.tracker.peek(one).is_ok_and(|written| written.is_empty())
    }

    /// In the first epoch only where there is time for it.
    fn comes_again(&self, feed: &Feed) -> bool {
        !self.is_first || feed.is_busy()
    }
}

/// A guest's memory while it stands still: pages have the bytes that they had, and come no more.
pub(crate) struct Paused<'p>(pub(crate) &'p Ram);

impl SentMemory for Paused<'_> {
    fn had(&self, page: PageNumber, bytes: &[u8]) -> bool {
        has(self.0, page, bytes)
    }

    fn comes_again(&self, _feed: &Feed) -> bool {
        false
    }
}

fn has(ram: &Ram, page: PageNumber, bytes: &[u8]) -> bool {
    let mut now = [0; PAGE_BYTES];
    ram.copy_page(page, &mut now);
    now == bytes
}

/// Which pages of an epoch have been sent on a connection.
#[derive(Debug)]
pub(crate) struct Fingerprints {
    places: Vec<Place>,
    most: u64,
    epoch: u32,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    fingerprint: u64,
    page: PageNumber,
    epoch: u32,
}

/// A fingerprint that is nobody's: no epoch has this number.
const EMPTY: Place = Place { fingerprint: 0, page: PageNumber(0), epoch: u32::MAX };

impl Fingerprints {
    /// For so many pages.
    pub(crate) fn new(pages: u64) -> Self {
        let most = pages.next_power_of_two().min(MOST_FINGERPRINTS);
        Self { places: Vec::new(), most, epoch: 0 }
    }

    /// A page that was sent in this epoch and has perhaps the same content.
    pub(crate) fn find(&self, fingerprint: u64) -> Option<PageNumber> {
        let place = self.places.get(self.index(fingerprint))?;
        (place.fingerprint == fingerprint && place.epoch == self.epoch).then_some(place.page)
    }

    /// Notes a page that was sent.
    pub(crate) fn note(&mut self, fingerprint: u64, page: PageNumber) {
        if self.places.is_empty() {
            self.places.resize(self.most as usize, EMPTY);
        }
        let index = self.index(fingerprint);
        self.places[index] = Place { fingerprint, page, epoch: self.epoch };
    }

    /// Forgets all.
    pub(crate) fn end_epoch(&mut self) {
        self.epoch += 1;
    }

    fn index(&self, fingerprint: u64) -> usize {
        (fingerprint & (self.most - 1)) as usize
    }
}

/// Copies of what was sent last of some pages.
#[derive(Debug)]
pub(crate) struct Versions {
    places: HashMap<PageNumber, usize>,
    copies: Vec<u8>,
    /// Places that nobody has.
    free: Vec<usize>,
    most_bytes: usize,
}

impl Versions {
    /// Copies of so many bytes at most.
    pub(crate) fn new(most_bytes: usize) -> Self {
        Self { places: HashMap::new(), copies: Vec::new(), free: Vec::new(), most_bytes }
    }

    /// Appends a page as the words that differ from what was sent last, and says whether it did: not where
    /// that is not known, or where they are many. From here on this is what was sent last.
    pub(crate) fn replace(&mut self, page: PageNumber, bytes: &[u8], delta: &mut Vec<u8>) -> bool {
        let Some(place) = self.places.get(&page) else { return false };
        let copy = &mut self.copies[place * PAGE_BYTES..][..PAGE_BYTES];
        let is_short = encode_words(bytes, Some(copy), MOST_DELTA_BYTES, delta);
        copy.copy_from_slice(bytes);
        is_short
    }

    /// Keeps what is sent of a page that is not known, if there is room.
    pub(crate) fn keep(&mut self, page: PageNumber, bytes: &[u8]) {
        if self.places.contains_key(&page) {
            return;
        }
        if let Some(place) = self.free.pop() {
            self.copies[place * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(bytes);
            self.places.insert(page, place);
        } else if self.copies.len() + PAGE_BYTES <= self.most_bytes {
            self.places.insert(page, self.copies.len() / PAGE_BYTES);
            self.copies.extend_from_slice(bytes);
        }
    }

    /// Forgets a page: zeros were sent of it, and nothing is compared with them.
    pub(crate) fn forget(&mut self, page: PageNumber) {
        self.free.extend(self.places.remove(&page));
    }
}
