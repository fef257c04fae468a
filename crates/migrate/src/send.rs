//! Sending pages: threads encode ([`PageSink`](crate::PageSink)), and one thread a connection sends.
//!
//! ```text
//!  worker 1: pages --frames of 64--> batch for each connection --+--> queue --> connection 0
//!  worker 2: pages --frames of 64--> batch for each connection --+--> queue --> connection 1
//! ```
//!
//! **A page always goes by the same connection.** So its versions arrive in the order in which they were
//! sent, if the sink that a version was put into is flushed before the next version is put
//! anywhere: [`PageSender::end_epoch`] does that for all that came before it.

use crate::MigrateError;
use crate::frames::FrameWriter;
use crate::gpu::{GpuHelp, GpuUsed, SharedGpu};
use crate::sent::{Fingerprints, Versions};
use dewar_codec::{Compression, Feed};
use dewar_memory::available_memory;
use dewar_units::{PAGE_BYTES, PageNumber};
use dewar_wire::frame::{HEADER_BYTES, Kind};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Pages that lie together and go by the same connection: those that a worker takes at a time.
const TOGETHER: u64 = 512;
/// A batch is sent when it has so many bytes.
pub(crate) const BATCH_BYTES: usize = 512 << 10;
/// Batches that wait for a connection.
const WAITING: usize = 2;

/// The share of the guest's memory, and of the host's that is available, that is kept as copies of what was
/// sent, and their most.
const COPIES_SHARE: u64 = 4;
const MOST_COPIES: u64 = 1 << 30;

/// A connection's thread.
type SenderThread = JoinHandle<Result<(), MigrateError>>;

/// What it is given.
enum Message {
    Pages(Vec<u8>),
    EndOfEpoch(u32),
}

/// Sends pages over the connections of a migration.
pub struct PageSender {
    queues: Vec<SyncSender<Message>>,
    threads: Vec<Mutex<Option<SenderThread>>>,
    pub(crate) feed: Arc<Feed>,
    bytes: Arc<AtomicU64>,
    level: i32,
    /// For each connection, where pages may refer to what was sent.
    sent: Vec<Mutex<Sent>>,
    related: Related,
    gpu: Option<Arc<SharedGpu>>,
}

/// What was sent over a connection.
pub(crate) struct Sent {
    pub(crate) fingerprints: Fingerprints,
    pub(crate) versions: Versions,
}

/// How many pages were sent as what they have in common with others.
#[derive(Debug, Default)]
pub(crate) struct Related {
    pub(crate) same: AtomicU64,
    pub(crate) deltas: AtomicU64,
}

impl PageSender {
    /// Begins to send over these connections; the number of each is its place in `links`. `level` is
    /// Zstandard's.
    pub fn start<W: Write + Send + 'static>(
        links: Vec<FrameWriter<W>>,
        compression: Compression,
        level: i32,
    ) -> Self {
        let room = links.len() * (WAITING + 1) * BATCH_BYTES;
        let feed = Arc::new(Feed::new(compression, room));
        let bytes = Arc::new(AtomicU64::new(0));
        let (mut queues, mut threads) = (Vec::new(), Vec::new());
        for writer in links {
            let (queue, messages) = sync_channel(WAITING);
            let (feed, bytes) = (Arc::clone(&feed), Arc::clone(&bytes));
            let thread = std::thread::spawn(move || send_all(writer, &messages, &feed, &bytes));
            threads.push(Mutex::new(Some(thread)));
            queues.push(queue);
        }
        Self {
            queues,
            threads,
            feed,
            bytes,
            level,
            sent: Vec::new(),
            related: Related::default(),
            gpu: None,
        }
    }

    /// Lets the pages of a guest, of so many, refer to what was sent before: the other side must know how
    /// to read that ([`Features::REFERENCES`](dewar_wire::hello::Features::REFERENCES)). Where all are to be
    /// sent as they are, they are.
    #[must_use]
    pub fn with_references(mut self, pages: u64) -> Self {
        if self.feed.sends_all_raw() {
            return self;
        }
        let connections = self.queues.len() as u64;
        // Hosts are left because they are short of memory, too.
        let spare = available_memory().unwrap_or(0) / COPIES_SHARE;
        let copies = (pages * PAGE_BYTES as u64 / COPIES_SHARE).min(spare).min(MOST_COPIES);
        let sent = || {
            let fingerprints = Fingerprints::new(pages / connections);
            let versions = Versions::new((copies / connections) as usize);
            Mutex::new(Sent { fingerprints, versions })
        };
        self.sent = (0..connections).map(|_| sent()).collect();
        self
    }

    /// Lets a GPU encode pages of the guest's memory, too, where codecs are chosen while it runs.
    #[must_use]
    pub fn with_gpu(mut self, help: GpuHelp) -> Self {
        self.gpu = help.0.filter(|_| self.feed.chooses());
        self
    }

    /// What a GPU did.
    pub fn gpu_used(&self) -> GpuUsed {
        self.gpu.as_ref().map(|gpu| gpu.used()).unwrap_or_default()
    }

    pub(crate) fn gpu(&self) -> Option<&Arc<SharedGpu>> {
        self.gpu.as_ref()
    }

    /// How many bytes were sent.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// How many pages were sent as the same as another.
    pub fn same_pages(&self) -> u64 {
        self.related.same.load(Ordering::Relaxed)
    }

    /// How many pages were sent as words that differ from the version before.
    pub fn delta_pages(&self) -> u64 {
        self.related.deltas.load(Ordering::Relaxed)
    }

    /// Which connection a page goes by.
    pub(crate) fn shard_of(&self, page: PageNumber) -> usize {
        (page.0 / TOGETHER % self.queues.len() as u64) as usize
    }

    pub(crate) fn connections(&self) -> usize {
        self.queues.len()
    }

    pub(crate) fn level(&self) -> i32 {
        self.level
    }

    pub(crate) fn related(&self) -> &Related {
        &self.related
    }

    /// What was sent over a connection, where pages may refer to it.
    pub(crate) fn sent(&self, shard: usize) -> Option<MutexGuard<'_, Sent>> {
        Some(self.sent.get(shard)?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sends a payload of pages.
    pub(crate) fn send(&self, shard: usize, payload: Vec<u8>) -> Result<(), MigrateError> {
        self.feed.given(payload.len());
        self.queue(shard, Message::Pages(payload))
    }

    /// Says on each connection that all pages of an epoch were sent. All sinks must be flushed.
    ///
    /// # Errors
    /// Where a connection failed.
    pub fn end_epoch(&self, epoch: u32) -> Result<(), MigrateError> {
        (0..self.queues.len()).try_for_each(|shard| {
            if let Some(mut sent) = self.sent(shard) {
                sent.fingerprints.end_epoch();
            }
            self.queue(shard, Message::EndOfEpoch(epoch))
        })
    }

    /// Waits until all was sent, and ends.
    ///
    /// # Errors
    /// Where a connection failed.
    pub fn finish(mut self) -> Result<(), MigrateError> {
        self.queues.clear();
        (0..self.threads.len()).map(|shard| self.join(shard)).fold(Ok(()), Result::and)
    }

    fn queue(&self, shard: usize, message: Message) -> Result<(), MigrateError> {
        if self.queues[shard].send(message).is_ok() {
            return Ok(());
        }
        // Its thread has ended, and says why to the first that asks.
        self.join(shard).and(Err(MigrateError::Ended(shard as u16)))
    }

    /// Waits for a connection's thread to end, unless another did.
    fn join(&self, shard: usize) -> Result<(), MigrateError> {
        let thread = self.threads[shard].lock().unwrap_or_else(PoisonError::into_inner).take();
        thread.map_or(Ok(()), |thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for PageSender {
    fn drop(&mut self) {
        if let Some(gpu) = &self.gpu {
            gpu.stop_looking();
        }
    }
}

fn send_all<W: Write>(
    mut writer: FrameWriter<W>,
    messages: &Receiver<Message>,
    feed: &Feed,
    bytes: &AtomicU64,
) -> Result<(), MigrateError> {
    for message in messages {
        match message {
            Message::Pages(payload) => {
                writer.send(Kind::Pages, &payload)?;
                bytes.fetch_add((HEADER_BYTES + payload.len()) as u64, Ordering::Relaxed);
                feed.taken(payload.len());
            }
            Message::EndOfEpoch(epoch) => writer.send(Kind::Barrier, &epoch.to_le_bytes())?,
        }
    }
    Ok(())
}
