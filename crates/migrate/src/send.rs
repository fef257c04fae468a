//! Sending pages: threads encode, and one thread a connection sends.
//!
//! ```text
//!  worker 1: pages --frames of 16--> batch for each connection --+--> queue --> connection 0
//!  worker 2: pages --frames of 16--> batch for each connection --+--> queue --> connection 1
//! ```
//!
//! **A page always goes by the same connection.** So its versions arrive in the order in which they were
//! sent, if the sink that a version was put into is flushed before the next version is put
//! anywhere: [`PageSender::end_epoch`] does that for all that came before it.

use crate::MigrateError;
use crate::frames::FrameWriter;
use dewar_codec::{Codec, Compression, Feed, MeasuredEncoder, PageKind, classify};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use dewar_wire::frame::{HEADER_BYTES, Kind};
use dewar_wire::pages::{MOST_PAGES, entry_bytes, put_pages, put_zeros};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Pages that lie together and go by the same connection: those that a worker takes at a time.
const TOGETHER: u64 = 512;
/// A batch is sent when it has so many bytes.
const BATCH_BYTES: usize = 512 << 10;
/// Batches that wait for a connection.
const WAITING: usize = 2;

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
    feed: Arc<Feed>,
    bytes: Arc<AtomicU64>,
    level: i32,
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
        Self { queues, threads, feed, bytes, level }
    }

    /// How many bytes were sent.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// One thread's way in.
    pub fn sink(&self) -> PageSink<'_> {
        let batches = self.queues.iter().map(|_| Batch::default()).collect();
        let encoder = MeasuredEncoder::new(self.level);
        PageSink { sender: self, batches, encoder, payload: Vec::new() }
    }

    /// Says on each connection that all pages of an epoch were sent. All sinks must be flushed.
    ///
    /// # Errors
    /// Where a connection failed.
    pub fn end_epoch(&self, epoch: u32) -> Result<(), MigrateError> {
        (0..self.queues.len()).try_for_each(|shard| self.queue(shard, Message::EndOfEpoch(epoch)))
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

/// What waits to be sent over one connection.
#[derive(Default)]
struct Batch {
    payload: Vec<u8>,
    compressible: Group,
    incompressible: Group,
    zeros: Option<PageRange>,
}

/// Pages that wait until a frame is full.
#[derive(Default)]
struct Group {
    pages: Vec<PageNumber>,
    bytes: Vec<u8>,
}

/// One thread's way over the connections. Flush it: what it has not sent is lost with it.
pub struct PageSink<'s> {
    sender: &'s PageSender,
    batches: Vec<Batch>,
    encoder: MeasuredEncoder,
    payload: Vec<u8>,
}

impl PageSink<'_> {
    /// Sends a page, soon.
    ///
    /// # Errors
    /// Where a connection failed.
    pub fn put(&mut self, page: PageNumber, bytes: &[u8]) -> Result<(), MigrateError> {
        let shard = (page.0 / TOGETHER % self.batches.len() as u64) as usize;
        let batch = &mut self.batches[shard];
        let kind = classify(bytes);
        let group = match kind {
            PageKind::Zero => return self.put_zero(shard, page),
            PageKind::Compressible => &mut batch.compressible,
            PageKind::Incompressible => &mut batch.incompressible,
        };
        group.pages.push(page);
        group.bytes.extend_from_slice(bytes);
        match group.pages.len() {
            MOST_PAGES => self.close(shard, kind),
            _ => Ok(()),
        }
    }

    /// Sends everything that was put.
    ///
    /// # Errors
    /// Where a connection failed.
    pub fn flush(&mut self) -> Result<(), MigrateError> {
        for shard in 0..self.batches.len() {
            self.close(shard, PageKind::Compressible)?;
            self.close(shard, PageKind::Incompressible)?;
            self.close_zeros(shard);
            self.submit(shard)?;
        }
        Ok(())
    }

    /// Zeros that lie together are one entry.
    fn put_zero(&mut self, shard: usize, page: PageNumber) -> Result<(), MigrateError> {
        let batch = &mut self.batches[shard];
        if let Some(range) = batch.zeros.as_mut().filter(|range| range.end == page) {
            range.end.0 += 1;
            return Ok(());
        }
        self.close_zeros(shard);
        self.batches[shard].zeros = Some(PageRange::new(page.0, page.0 + 1));
        self.submit_if_full(shard)
    }

    fn close_zeros(&mut self, shard: usize) {
        let batch = &mut self.batches[shard];
        if let Some(range) = batch.zeros.take() {
            put_zeros(&mut batch.payload, range);
        }
    }

    /// Makes an entry of a group.
    fn close(&mut self, shard: usize, kind: PageKind) -> Result<(), MigrateError> {
        let batch = &mut self.batches[shard];
        let Batch { payload, compressible, incompressible, .. } = batch;
        let group = if kind == PageKind::Compressible { compressible } else { incompressible };
        if group.pages.is_empty() {
            return Ok(());
        }
        let left = BATCH_BYTES.saturating_sub(payload.len());
        let codec = match kind {
            PageKind::Compressible => {
                self.encoder.encode(&self.sender.feed, &group.bytes, left, &mut self.payload)?
            }
            _ => {
                self.encoder.passed(group.bytes.len());
                Codec::Raw
            }
        };
        let made = if codec == Codec::Raw { &group.bytes } else { &self.payload };
        put_pages(payload, &group.pages, codec, made);
        group.pages.clear();
        group.bytes.clear();
        self.submit_if_full(shard)
    }

    fn submit_if_full(&mut self, shard: usize) -> Result<(), MigrateError> {
        let full = self.sender.feed.piece_bytes(BATCH_BYTES);
        match self.batches[shard].payload.len() >= full {
            true => self.submit(shard),
            false => Ok(()),
        }
    }

    fn submit(&mut self, shard: usize) -> Result<(), MigrateError> {
        let fresh = Vec::with_capacity(BATCH_BYTES + entry_bytes(MOST_PAGES));
        let payload = std::mem::replace(&mut self.batches[shard].payload, fresh);
        if payload.is_empty() {
            return Ok(());
        }
        self.sender.feed.given(payload.len());
        self.sender.queue(shard, Message::Pages(payload))?;
        self.encoder.waited();
        Ok(())
    }
}

const _: () = assert!(BATCH_BYTES + MOST_PAGES * (PAGE_BYTES + 8) + 64 < 2 << 20);
