//! Receiving pages: one thread a connection, which expands and writes what arrives there.
//!
//! An epoch has arrived when it ended on every connection. What is damaged or out of place ends the
//! migration: nothing of such a frame is written, and the memory is never used.

use crate::MigrateError;
use crate::frames::FrameReader;
use crate::new_memory::NewMemory;
use dewar_codec::{CodecError, FrameDecoder, WordBase, decode_words};
use dewar_units::{PAGE_BYTES, PageNumber, PageSet};
use dewar_wire::frame::Kind;
use dewar_wire::pages::{Entry, Form, MOST_PAGES, entries};
use std::collections::HashMap;
use std::io::Read;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// What arrived.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Received {
    /// Pages, each time.
    pub pages: u64,
    /// Bytes of frames.
    pub bytes: u64,
}

/// Receives pages over the connections of a migration.
pub struct PageReceiver {
    progress: Arc<Progress>,
    threads: Vec<JoinHandle<Result<Received, MigrateError>>>,
}

/// How far the connections are.
#[derive(Default)]
struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// For each connection how many epochs ended.
    epochs: Vec<u32>,
    /// Connections that have ended.
    ended: usize,
    /// Why the first of them failed, if one did.
    failure: Option<String>,
}

impl PageReceiver {
    /// Begins to receive over these connections, into this memory; the number of each is its place
    /// in `links`.
    pub fn start<R: Read + Send + 'static>(
        links: Vec<FrameReader<R>>,
        memory: &Arc<NewMemory>,
    ) -> Self {
        let state = State { epochs: vec![0; links.len()], ..State::default() };
        let progress = Arc::new(Progress { state: Mutex::new(state), changed: Condvar::new() });
        let threads = links.into_iter().map(|reader| {
            let (memory, progress) = (Arc::clone(memory), Arc::clone(&progress));
            std::thread::spawn(move || {
                let _ended = Ended(&progress);
                let received = Shard::new(reader, &memory, &progress).and_then(Shard::receive);
                received.inspect_err(|error| {
                    progress.lock().failure.get_or_insert(error.to_string());
                })
            })
        });
        Self { threads: threads.collect(), progress }
    }

    /// Waits until an epoch has arrived; they are counted from 1. Says whether it has: not where a
    /// connection ended before, why [`PageReceiver::finish`] tells.
    pub fn wait(&self, epoch: u32) -> bool {
        let state = self.progress.lock();
        let has_arrived = |state: &State| state.epochs.iter().all(|ended| *ended >= epoch);
        let wait = |state: &mut State| !has_arrived(state) && state.ended == 0;
        let state = self.progress.changed.wait_while(state, wait);
        has_arrived(&state.unwrap_or_else(PoisonError::into_inner))
    }

    /// The same, for so long; nothing where it is not known then.
    pub fn wait_within(&self, epoch: u32, time: Duration) -> Option<bool> {
        let state = self.progress.lock();
        let has_arrived = |state: &State| state.epochs.iter().all(|ended| *ended >= epoch);
        let wait = |state: &mut State| !has_arrived(state) && state.ended == 0;
        let waited = self.progress.changed.wait_timeout_while(state, time, wait);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        (!timeout.timed_out() || has_arrived(&state)).then(|| has_arrived(&state))
    }

    /// Why a connection failed, if one did.
    pub fn failure(&self) -> Option<String> {
        self.progress.lock().failure.clone()
    }

    /// Waits until all connections have ended.
    ///
    /// # Errors
    /// The first error of a connection.
    pub fn finish(self) -> Result<Received, MigrateError> {
        let mut all = Received::default();
        let mut failure = None;
        for thread in self.threads {
            match thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                Ok(one) => {
                    all.pages += one.pages;
                    all.bytes += one.bytes;
                }
                Err(error) => drop(failure.get_or_insert(error)),
            }
        }
        failure.map_or(Ok(all), Err)
    }
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says that a connection has ended, however it did.
struct Ended<'p>(&'p Progress);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.lock().ended += 1;
        self.0.changed.notify_all();
    }
}

/// One connection's thread.
struct Shard<'m, R> {
    reader: FrameReader<R>,
    memory: &'m NewMemory,
    progress: &'m Progress,
    decoder: FrameDecoder,
    /// Pages that it wrote: others are zeros still.
    written: PageSet,
    received: Received,
    expanded: Vec<u8>,
    others: Others,
}

impl<'m, R: Read> Shard<'m, R> {
    fn new(
        reader: FrameReader<R>,
        memory: &'m NewMemory,
        progress: &'m Progress,
    ) -> Result<Self, MigrateError> {
        Ok(Self {
            reader,
            memory,
            progress,
            decoder: FrameDecoder::new()?,
            written: PageSet::new(memory.pages()),
            received: Received::default(),
            expanded: Vec::new(),
            others: Others::default(),
        })
    }

    fn receive(mut self) -> Result<Received, MigrateError> {
        let (shard, mut epoch) = (self.reader.shard(), 0);
        loop {
            let Self { reader, memory, decoder, written, received, expanded, others, .. } =
                &mut self;
            let Some((kind, payload)) = reader.receive()? else { return Ok(self.received) };
            match kind {
                Kind::Pages => {
                    received.bytes += payload.len() as u64;
                    let mut write = Write { memory, decoder, written, received, expanded, others };
                    entries(payload, memory.pages()).try_for_each(|entry| write.entry(entry?))?;
                }
                Kind::Barrier => {
                    let found = payload.try_into().map_err(|_| MigrateError::Unexpected(shard))?;
                    let (found, wanted) = (u32::from_le_bytes(found), epoch + 1);
                    if found != wanted {
                        return Err(MigrateError::Epoch { shard, found, wanted });
                    }
                    epoch = found;
                    others.0.clear();
                    self.progress.lock().epochs[usize::from(shard)] = epoch;
                    self.progress.changed.notify_all();
                }
                _ => return Err(MigrateError::Unexpected(shard)),
            }
        }
    }
}

/// Writes entries into memory.
struct Write<'w> {
    memory: &'w NewMemory,
    decoder: &'w mut FrameDecoder,
    written: &'w mut PageSet,
    received: &'w mut Received,
    expanded: &'w mut Vec<u8>,
    others: &'w mut Others,
}

/// Pages of this epoch that others are the same as. Each page comes once in an epoch, so they stay as they are.
#[derive(Default)]
struct Others(HashMap<PageNumber, Vec<u8>>);

/// How many of them are kept: those of many equal pages are few.
const MOST_OTHERS: usize = 256;

impl Write<'_> {
    fn entry(&mut self, entry: Entry<'_>) -> Result<(), MigrateError> {
        match entry {
            Entry::Zeros(range) => {
                self.received.pages += range.count();
                self.memory.write_zeros(range, self.written)
            }
            Entry::Encoded { pages, form, bytes } => {
                self.expand(&pages, form, bytes)?;
                self.write(&pages)
            }
            Entry::Same(pairs) => pairs.chunks(MOST_PAGES).try_for_each(|pairs| self.same(pairs)),
        }
    }

    /// Expands pages to what they are.
    fn expand(
        &mut self,
        pages: &[PageNumber],
        form: Form,
        mut bytes: &[u8],
    ) -> Result<(), MigrateError> {
        let size = pages.len() * PAGE_BYTES;
        let base = match form {
            Form::Frame(codec) => {
                return Ok(self.decoder.decode(codec, bytes, size, self.expanded)?);
            }
            Form::Words(base) => base,
        };
        self.expanded.resize(size, 0);
        for (index, page) in pages.iter().enumerate() {
            if base == WordBase::PagePresent {
                self.read(*page, index)?;
            }
            let place = &mut self.expanded[index * PAGE_BYTES..][..PAGE_BYTES];
            decode_words(&mut bytes, base, place)?;
        }
        match bytes.is_empty() {
            true => Ok(()),
            false => Err(CodecError::WrongWords.into()),
        }
    }

    /// Copies pages from others.
    fn same(&mut self, pairs: &[(PageNumber, PageNumber)]) -> Result<(), MigrateError> {
        self.expanded.resize(pairs.len() * PAGE_BYTES, 0);
        for (index, (_, other)) in pairs.iter().enumerate() {
            self.memory.refuse_in_use(*other)?;
            if !self.others.0.contains_key(other) {
                self.read(*other, index)?;
                if self.others.0.len() == MOST_OTHERS {
                    self.others.0.clear();
                }
                let bytes = self.expanded[index * PAGE_BYTES..][..PAGE_BYTES].to_vec();
                self.others.0.insert(*other, bytes);
            }
            let place = &mut self.expanded[index * PAGE_BYTES..][..PAGE_BYTES];
            place.copy_from_slice(&self.others.0[other]);
        }
        let pages: Vec<PageNumber> = pairs.iter().map(|(page, _)| *page).collect();
        self.write(&pages)
    }

    /// Reads a page that came on this connection into its place among those that are expanded.
    fn read(&mut self, page: PageNumber, index: usize) -> Result<(), MigrateError> {
        if !self.written.contains(page) {
            return Err(MigrateError::Refers(page));
        }
        self.memory.read(page, &mut self.expanded[index * PAGE_BYTES..][..PAGE_BYTES])
    }

    fn write(&mut self, pages: &[PageNumber]) -> Result<(), MigrateError> {
        self.received.pages += pages.len() as u64;
        for page in pages {
            self.written.insert(*page);
        }
        self.memory.write(pages, self.expanded)
    }
}
