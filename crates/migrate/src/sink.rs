//! One thread's way over the connections of a migration.
//!
//! A page is sent in the first of these ways that it allows: as zeros; as the words that differ from the version
//! that the other side has; as the same as another page; as the few words that it consists of; with others of its
//! kind in a frame that a codec shrinks, or as they are. The first four cost less than sending it would.
//!
//! **A page refers only to a page that precedes it on the same connection.** Pages that this thread has not
//! submitted are known to this thread alone (`unsubmitted`), and `submit` writes them before those that refer to
//! them. Other threads learn of a page when its payload is in the connection's queue.

use crate::MigrateError;
use crate::send::{BATCH_BYTES, PageSender};
use crate::sent::SentMemory;
use dewar_codec::{Codec, MeasuredEncoder, PageKind, WordBase, classify, encode_words, is_zero};
use dewar_memory::sum;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use dewar_wire::pages::{Form, MOST_PAGES, MOST_SAME, entry_bytes, put_pages, put_same, put_zeros};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A page of few words has at most so many bytes: eight words in as many groups.
const MOST_RUNS_BYTES: usize = 1 + 16 * 8;

/// What pages that are sent together have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Group {
    Compressible,
    Incompressible,
    Deltas,
    Runs,
}

const GROUPS: [Group; 4] = [Group::Compressible, Group::Incompressible, Group::Deltas, Group::Runs];

/// What waits to be sent over one connection.
#[derive(Default)]
struct Batch {
    payload: Vec<u8>,
    /// One for each group.
    groups: [Waiting; GROUPS.len()],
    zeros: Option<PageRange>,
    /// Pages, and which other each is the same as.
    same: Vec<(PageNumber, PageNumber)>,
    /// The fingerprints of pages that were put and that others do not know of.
    unsubmitted: HashMap<u64, PageNumber>,
}

/// Pages that wait until a frame is full.
#[derive(Default)]
struct Waiting {
    pages: Vec<PageNumber>,
    bytes: Vec<u8>,
}

/// One thread's way over the connections. Flush it: what it has not sent is lost with it.
pub struct PageSink<'s> {
    sender: &'s PageSender,
    memory: Option<&'s dyn SentMemory>,
    batches: Vec<Batch>,
    encoder: MeasuredEncoder,
    encoded: Vec<u8>,
    waited: Duration,
}

/// A page that a GPU has looked at.
pub(crate) struct LookedAt<'l> {
    pub(crate) is_zero: bool,
    /// As [`fingerprint`] says.
    pub(crate) fingerprint: u64,
    /// The page as an LZ4 block, where that is worth it.
    pub(crate) block: Option<&'l [u8]>,
}

/// XXH3 of 64 bits.
fn fingerprint(page: &[u8]) -> u64 {
    // The lower half of XXH3 of 128 bits is that of 64, for so many bytes.
    sum(page) as u64
}

impl PageSender {
    /// One thread's way in, for pages that stand each for itself.
    pub fn sink(&self) -> PageSink<'_> {
        PageSink::new(self, None)
    }

    /// One thread's way in, for pages of this memory, which may refer to what was sent before.
    pub fn sink_of<'s>(&'s self, memory: &'s dyn SentMemory) -> PageSink<'s> {
        PageSink::new(self, Some(memory))
    }
}

impl<'s> PageSink<'s> {
    fn new(sender: &'s PageSender, memory: Option<&'s dyn SentMemory>) -> Self {
        let batches = (0..sender.connections()).map(|_| Batch::default()).collect();
        let encoder = MeasuredEncoder::new(sender.level());
        Self { sender, memory, batches, encoder, encoded: Vec::new(), waited: Duration::ZERO }
    }

    /// How many bytes of pages that no codec shrinks went by since that was last asked or told.
    pub(crate) fn take_passed(&mut self) -> u64 {
        self.encoder.take_passed()
    }

    /// How long it has waited for the connections.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// Sends a page, soon. In an epoch each page is put once.
    ///
    /// # Errors
    /// Where a connection failed: then nothing more can be sent by this sender.
    pub fn put(&mut self, page: PageNumber, bytes: &[u8]) -> Result<(), MigrateError> {
        let shard = self.sender.shard_of(page);
        if is_zero(bytes) {
            return self.put_zero(shard, page);
        }
        if self.put_related(shard, page, bytes, None)? {
            return Ok(());
        }
        let group = match classify(bytes) {
            PageKind::Incompressible => Group::Incompressible,
            PageKind::Compressible | PageKind::Zero => Group::Compressible,
        };
        self.put_plain(shard, group, page, bytes)
    }

    /// As [`put`](Self::put), for a page that a GPU has looked at. Says whether its block was sent.
    pub(crate) fn put_looked_at(
        &mut self,
        page: PageNumber,
        bytes: &[u8],
        looked: &LookedAt<'_>,
    ) -> Result<bool, MigrateError> {
        let shard = self.sender.shard_of(page);
        // A zero that is none would be lost.
        if looked.is_zero && is_zero(bytes) {
            return self.put_zero(shard, page).map(|()| false);
        }
        if self.put_related(shard, page, bytes, Some(looked.fingerprint))? {
            return Ok(false);
        }
        let Some(block) = looked.block else {
            return self.put_plain(shard, Group::Incompressible, page, bytes).map(|()| false);
        };
        let payload = &mut self.batches[shard].payload;
        put_pages(payload, &[page], Form::Frame(Codec::Lz4), block);
        self.submit_if_full(shard).map(|()| true)
    }

    fn put_plain(
        &mut self,
        shard: usize,
        group: Group,
        page: PageNumber,
        bytes: &[u8],
    ) -> Result<(), MigrateError> {
        let waiting = &mut self.batches[shard].groups[group as usize];
        waiting.pages.push(page);
        waiting.bytes.extend_from_slice(bytes);
        self.close_if_full(shard, group)
    }

    /// Sends everything that was put.
    ///
    /// # Errors
    /// Where a connection failed.
    pub fn flush(&mut self) -> Result<(), MigrateError> {
        (0..self.batches.len()).try_for_each(|shard| self.submit(shard))
    }

    /// Zeros that lie together are one entry.
    fn put_zero(&mut self, shard: usize, page: PageNumber) -> Result<(), MigrateError> {
        if let Some(mut sent) = self.sender.sent(shard) {
            sent.versions.forget(page);
        }
        let batch = &mut self.batches[shard];
        if let Some(range) = batch.zeros.as_mut().filter(|range| range.end == page) {
            range.end.0 += 1;
            return Ok(());
        }
        batch.close_zeros();
        batch.zeros = Some(PageRange::new(page.0, page.0 + 1));
        self.submit_if_full(shard)
    }

    /// Puts a page that has much in common with what was sent before, or in itself; says whether it did. Its
    /// fingerprint may be known.
    fn put_related(
        &mut self,
        shard: usize,
        page: PageNumber,
        bytes: &[u8],
        known: Option<u64>,
    ) -> Result<bool, MigrateError> {
        let Some(mut sent) = self.sender.sent(shard) else { return Ok(false) };
        let Some(memory) = self.memory else {
            sent.versions.forget(page);
            return Ok(false);
        };
        let batch = &mut self.batches[shard];
        let deltas = &mut batch.groups[Group::Deltas as usize];
        if sent.versions.append_delta(page, bytes, &mut deltas.bytes) {
            deltas.pages.push(page);
            drop(sent);
            self.sender.related().deltas.fetch_add(1, Ordering::Relaxed);
            return self.close_if_full(shard, Group::Deltas).map(|()| true);
        }
        drop(sent);
        let fingerprint = known.unwrap_or_else(|| fingerprint(bytes));
        let comes_again = memory.comes_again(&self.sender.feed);
        let mut other = batch.unsubmitted.get(&fingerprint).copied();
        if let Some(mut sent) = self.sender.sent(shard) {
            sent.versions.keep(page, bytes, comes_again);
            other = other.or_else(|| sent.fingerprints.find(fingerprint));
        }
        if let Some(other) = other.filter(|other| memory.was_sent_as(*other, bytes)) {
            batch.same.push((page, other));
            self.sender.related().same.fetch_add(1, Ordering::Relaxed);
            return self.submit_if_full(shard).map(|()| true);
        }
        batch.unsubmitted.insert(fingerprint, page);
        let runs = &mut batch.groups[Group::Runs as usize];
        if encode_words(bytes, None, MOST_RUNS_BYTES, &mut runs.bytes) {
            runs.pages.push(page);
            return self.close_if_full(shard, Group::Runs).map(|()| true);
        }
        Ok(false)
    }

    fn close_if_full(&mut self, shard: usize, group: Group) -> Result<(), MigrateError> {
        if self.batches[shard].groups[group as usize].pages.len() < MOST_PAGES {
            return Ok(());
        }
        self.close(shard, group)?;
        self.submit_if_full(shard)
    }

    /// Makes an entry of what waits in a group.
    fn close(&mut self, shard: usize, group: Group) -> Result<(), MigrateError> {
        let Batch { payload, groups, .. } = &mut self.batches[shard];
        let Waiting { pages, bytes } = &mut groups[group as usize];
        if pages.is_empty() {
            return Ok(());
        }
        let form = match group {
            Group::Compressible => {
                let left = BATCH_BYTES.saturating_sub(payload.len());
                let feed = &self.sender.feed;
                Form::Frame(self.encoder.encode(feed, bytes, left, &mut self.encoded)?)
            }
            Group::Incompressible => Form::Frame(Codec::Raw),
            Group::Deltas => Form::Words(WordBase::PagePresent),
            Group::Runs => Form::Words(WordBase::WordBefore),
        };
        let is_encoded = group == Group::Compressible && form != Form::Frame(Codec::Raw);
        if group != Group::Compressible {
            self.encoder.passed(bytes.len());
        }
        put_pages(payload, pages, form, if is_encoded { &self.encoded } else { bytes });
        pages.clear();
        bytes.clear();
        Ok(())
    }

    fn submit_if_full(&mut self, shard: usize) -> Result<(), MigrateError> {
        let batch = &self.batches[shard];
        let full = self.sender.feed.piece_bytes(BATCH_BYTES);
        match batch.payload.len() >= full || batch.same.len() == MOST_SAME {
            true => self.submit(shard),
            false => Ok(()),
        }
    }

    /// Gives a connection all that was put for it.
    fn submit(&mut self, shard: usize) -> Result<(), MigrateError> {
        GROUPS.into_iter().try_for_each(|group| self.close(shard, group))?;
        let batch = &mut self.batches[shard];
        batch.close_zeros();
        if !batch.same.is_empty() {
            put_same(&mut batch.payload, &batch.same);
            batch.same.clear();
        }
        if batch.payload.is_empty() {
            return Ok(());
        }
        let fresh = Vec::with_capacity(BATCH_BYTES + entry_bytes(MOST_PAGES));
        let payload = std::mem::replace(&mut batch.payload, fresh);
        let began = Instant::now();
        self.sender.send(shard, payload)?;
        self.waited += began.elapsed();
        if let Some(mut sent) = self.sender.sent(shard) {
            let pages = batch.unsubmitted.drain();
            pages.for_each(|(fingerprint, page)| sent.fingerprints.note(fingerprint, page));
        }
        self.encoder.waited();
        Ok(())
    }
}

impl Batch {
    fn close_zeros(&mut self) {
        if let Some(range) = self.zeros.take() {
            put_zeros(&mut self.payload, range);
        }
    }
}

/// A payload that is full, all that waits in groups, and pages that are the same as others.
const _: () = assert!(
    BATCH_BYTES + GROUPS.len() * (MOST_PAGES * (PAGE_BYTES + 8) + 8) + MOST_SAME * 16 + 64
        < 2 << 20
);
