//! What was sent over a connection, so that it need not be sent again.
//!
//! *The same.* For the pages of this epoch a fingerprint of each says where to look: a page whose fingerprint
//! came before may be the same as that one. Whether it is, content decides ([`SentMemory`]).
//!
//! *Versions.* Of pages that may come again a copy of what was sent is kept, and the next version is sent as
//! the words that differ. The copies are bounded: those of the first epoch, in which all pages come, make room for
//! those of later ones, in which pages come that the guest writes.

use dewar_codec::{Feed, encode_words};
use dewar_memory::{Ram, WriteTracker};
use dewar_units::{PAGE_BYTES, PageNumber};
use std::collections::HashMap;

/// Fingerprints of a connection at most, 24 bytes each. A newer one takes the slot of an older one.
const MOST_FINGERPRINTS: u64 = 1 << 20;
/// A delta is sent where it has at most so many bytes. A codec leaves about as much of a page, of those
/// that it shrinks.
const MOST_DELTA_BYTES: usize = PAGE_BYTES / 8;

/// How likely a page is to be sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComesAgain {
    /// It is not.
    Never,
    /// As any page is.
    Perhaps,
    /// The guest wrote it in the last epoch.
    Likely,
}

/// The source's memory, in which pages that were sent are looked at again.
pub trait SentMemory: Sync {
    /// Whether a page that was put in this epoch had these bytes then.
    fn was_sent_as(&self, page: PageNumber, bytes: &[u8]) -> bool;

    /// Whether a page of this epoch comes again; `Never` also where a copy of it is not worth the time.
    fn comes_again(&self, feed: &Feed) -> ComesAgain;
}

/// A guest's memory while it runs. **A page had some bytes when it was put if it has them now and was not
/// written since its epoch began** (the tracker's set was taken, or it was armed, and the guest's I/O was
/// drained).
pub(crate) struct Tracked<'t> {
    pub(crate) ram: &'t Ram,
    pub(crate) tracker: &'t WriteTracker,
    /// Whether all pages are sent, of which few come again.
    pub(crate) is_first: bool,
}

impl SentMemory for Tracked<'_> {
    fn was_sent_as(&self, page: PageNumber, bytes: &[u8]) -> bool {
        // In this order: a write is recorded before it is done, so one that the first look saw is seen by
        // the second.
        is_now(self.ram, page, bytes)
            && self.tracker.is_written(page).is_ok_and(|is_written| !is_written)
    }

    fn comes_again(&self, feed: &Feed) -> ComesAgain {
        comes_again(self.is_first, feed)
    }
}

/// Copies of a guest's memory: nothing writes them while an epoch is sent.
pub(crate) struct Copied<'c> {
    pub(crate) ram: &'c Ram,
    /// As in [`Tracked`].
    pub(crate) is_first: bool,
}

impl SentMemory for Copied<'_> {
    fn was_sent_as(&self, page: PageNumber, bytes: &[u8]) -> bool {
        is_now(self.ram, page, bytes)
    }

    fn comes_again(&self, feed: &Feed) -> ComesAgain {
        comes_again(self.is_first, feed)
    }
}

fn comes_again(is_first: bool, feed: &Feed) -> ComesAgain {
    match is_first {
        true if feed.is_busy() => ComesAgain::Perhaps,
        true => ComesAgain::Never,
        false => ComesAgain::Likely,
    }
}

/// A guest's memory while it stands still: pages have the bytes that they had, and come no more.
pub(crate) struct Paused<'p>(pub(crate) &'p Ram);

impl SentMemory for Paused<'_> {
    fn was_sent_as(&self, page: PageNumber, bytes: &[u8]) -> bool {
        is_now(self.0, page, bytes)
    }

    fn comes_again(&self, _feed: &Feed) -> ComesAgain {
        ComesAgain::Never
    }
}

fn is_now(ram: &Ram, page: PageNumber, bytes: &[u8]) -> bool {
    let mut now = [0; PAGE_BYTES];
    ram.copy_page(page, &mut now);
    now == bytes
}

/// Which pages of an epoch have been sent on a connection.
#[derive(Debug)]
pub(crate) struct Fingerprints {
    slots: Vec<Fingerprint>,
    epoch: u32,
}

#[derive(Debug, Clone, Copy)]
struct Fingerprint {
    of_content: u64,
    page: PageNumber,
    epoch: u32,
}

/// No epoch has this number.
const NO_FINGERPRINT: Fingerprint =
    Fingerprint { of_content: 0, page: PageNumber(0), epoch: u32::MAX };

impl Fingerprints {
    /// For so many pages.
    pub(crate) fn new(pages: u64) -> Self {
        let slots = pages.next_power_of_two().min(MOST_FINGERPRINTS);
        Self { slots: vec![NO_FINGERPRINT; slots as usize], epoch: 0 }
    }

    /// A page that was sent in this epoch and has perhaps the same content.
    pub(crate) fn find(&self, of_content: u64) -> Option<PageNumber> {
        let found = self.slots[self.slot(of_content)];
        (found.of_content == of_content && found.epoch == self.epoch).then_some(found.page)
    }

    /// Notes a page that was sent.
    pub(crate) fn note(&mut self, of_content: u64, page: PageNumber) {
        let slot = self.slot(of_content);
        self.slots[slot] = Fingerprint { of_content, page, epoch: self.epoch };
    }

    /// Forgets all.
    pub(crate) fn end_epoch(&mut self) {
        self.epoch += 1;
    }

    fn slot(&self, of_content: u64) -> usize {
        of_content as usize & (self.slots.len() - 1)
    }
}

/// Copies of what was sent last of some pages.
#[derive(Debug)]
pub(crate) struct Versions {
    kept: HashMap<PageNumber, Kept>,
    /// A page for each slot.
    copies: Vec<u8>,
    /// Slots that no page has.
    free: Vec<usize>,
    /// Pages that were kept in the first epoch.
    cold: Vec<PageNumber>,
    most_bytes: usize,
}

/// Where the copy of a page is.
#[derive(Debug)]
struct Kept {
    slot: usize,
    /// Whether it comes again.
    is_hot: bool,
}

impl Versions {
    /// Copies of so many bytes at most.
    pub(crate) fn new(most_bytes: usize) -> Self {
        Self {
            kept: HashMap::new(),
            copies: Vec::new(),
            free: Vec::new(),
            cold: Vec::new(),
            most_bytes,
        }
    }

    /// Appends a page as the words that differ from what was sent last, and says whether it did: not where
    /// that is not known, or where they are many. From here on this is what was sent last.
    pub(crate) fn append_delta(
        &mut self,
        page: PageNumber,
        bytes: &[u8],
        delta: &mut Vec<u8>,
    ) -> bool {
        let Some(kept) = self.kept.get_mut(&page) else { return false };
        kept.is_hot = true;
        let copy = &mut self.copies[kept.slot * PAGE_BYTES..][..PAGE_BYTES];
        let is_short = encode_words(bytes, Some(copy), MOST_DELTA_BYTES, delta);
        copy.copy_from_slice(bytes);
        is_short
    }

    /// Keeps what is sent of a page that is not known, if there is room.
    pub(crate) fn keep(&mut self, page: PageNumber, bytes: &[u8], comes_again: ComesAgain) {
        if comes_again == ComesAgain::Never || self.kept.contains_key(&page) {
            return;
        }
        let has_room = self.copies.len() + PAGE_BYTES <= self.most_bytes;
        if !has_room && self.free.is_empty() && comes_again == ComesAgain::Likely {
            self.free_a_cold_slot();
        }
        let slot = match self.free.pop() {
            Some(slot) => {
                self.copies[slot * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(bytes);
                slot
            }
            None if has_room => {
                self.copies.extend_from_slice(bytes);
                self.copies.len() / PAGE_BYTES - 1
            }
            None => return,
        };
        let is_hot = comes_again == ComesAgain::Likely;
        self.kept.insert(page, Kept { slot, is_hot });
        if !is_hot {
            self.cold.push(page);
        }
    }

    fn free_a_cold_slot(&mut self) {
        while let Some(page) = self.cold.pop() {
            if self.kept.get(&page).is_some_and(|kept| !kept.is_hot) {
                return self.forget(page);
            }
        }
    }

    /// Forgets a page: zeros were sent of it, or something that is not to be compared with.
    pub(crate) fn forget(&mut self, page: PageNumber) {
        self.free.extend(self.kept.remove(&page).map(|kept| kept.slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_takes_the_room_of_what_is_not() {
        let mut versions = Versions::new(4 * PAGE_BYTES);
        let page = |fill: u8| vec![fill; PAGE_BYTES];
        let is_known = |versions: &mut Versions, number: u64, fill: u8| {
            versions.append_delta(PageNumber(number), &page(fill), &mut Vec::new())
        };
        for number in 0..9 {
            versions.keep(PageNumber(number), &page(number as u8), ComesAgain::Perhaps);
        }
        versions.keep(PageNumber(50), &page(1), ComesAgain::Never);
        // Page 2 comes again, and is hot; 0, 1 and 3 make room, then nothing does.
        assert!(is_known(&mut versions, 2, 2));
        for number in 20..30 {
            versions.keep(PageNumber(number), &page(number as u8), ComesAgain::Likely);
        }
        let known: Vec<u64> =
            (0..100).filter(|number| is_known(&mut versions, *number, *number as u8)).collect();
        assert_eq!(known, [2, 20, 21, 22]);
        // The slot of one that is forgotten is another's, and what is there is that one's.
        versions.forget(PageNumber(20));
        versions.keep(PageNumber(60), &page(60), ComesAgain::Likely);
        assert!(!is_known(&mut versions, 20, 60) && is_known(&mut versions, 60, 60));
        assert!(!is_known(&mut versions, 60, 61), "every word of it is another");
    }

    #[test]
    fn fingerprints_are_those_of_an_epoch() {
        let mut sent = Fingerprints::new(100);
        assert_eq!(sent.find(0), None);
        sent.note(5, PageNumber(7));
        // The same slot.
        assert_eq!((sent.find(5), sent.find(5 + 128)), (Some(PageNumber(7)), None));
        sent.note(5 + 128, PageNumber(8));
        assert_eq!((sent.find(5), sent.find(5 + 128)), (None, Some(PageNumber(8))));
        sent.end_epoch();
        assert_eq!(sent.find(5 + 128), None);
    }
}
