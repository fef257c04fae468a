//! One thread that copies pages of a guest's memory, and has them encoded: by itself, or by a GPU where that pays.
//!
//! The GPU gets pages in batches, of which a few are under way: this thread fills one while the GPU encodes
//! others. A batch that comes back is put into the sink page by page. All come back before the sink is flushed, so
//! that an epoch ends with its own pages.

use crate::MigrateError;
use crate::gpu::SharedGpu;
use crate::send::{BATCH_BYTES, PageSender};
use crate::sent::SentMemory;
use crate::sink::{LookedAt, PageSink};
use dewar_codec::Frame;
use dewar_codec_gpu::{Batch, Encoding, GpuError};
use dewar_memory::{Ram, available_memory};
use dewar_units::{PAGE_BYTES, PageNumber};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages of a batch, and batches under way.
const BATCH: usize = 2048;
const AT_ONCE: usize = 3;
/// Pinned memory of a thread's batches, and the share of what the host has free that it may be.
const PINNED: u64 = (AT_ONCE * 2 * BATCH * PAGE_BYTES) as u64;
const HOST_SHARE: u64 = 16;
/// A page is sent as its block where that has at most so many bytes.
const MOST_BLOCK_BYTES: usize = PAGE_BYTES * 9 / 10;

/// One thread's way to send pages of a guest's memory.
pub(crate) struct PageFeeder<'f> {
    ram: &'f Ram,
    sender: &'f PageSender,
    sink: PageSink<'f>,
    page: Vec<u8>,
    /// Pages until it is asked again whether the GPU pays.
    before_asking: usize,
    gpu: Option<GpuFeeder<'f>>,
    /// Whether this thread may feed the GPU.
    may_feed: bool,
}

/// A thread's batches.
struct GpuFeeder<'f> {
    shared: &'f SharedGpu,
    idle: Vec<Batch<'f>>,
    under_way: VecDeque<UnderWay<'f>>,
    /// The batch that is being filled.
    filling: Option<UnderWay<'f>>,
}

/// A batch and its pages.
struct UnderWay<'f> {
    batch: Batch<'f>,
    pages: Vec<PageNumber>,
    began: Instant,
    /// What this thread took to fill it.
    filled_in: Duration,
}

impl<'f> PageFeeder<'f> {
    pub(crate) fn new(sender: &'f PageSender, ram: &'f Ram, memory: &'f dyn SentMemory) -> Self {
        Self {
            ram,
            sender,
            sink: sender.sink_of(memory),
            page: vec![0; PAGE_BYTES],
            before_asking: BATCH,
            gpu: None,
            may_feed: false,
        }
    }

    /// Lets the GPU of the sender encode pages, if there is one.
    pub(crate) fn with_gpu(mut self) -> Self {
        self.may_feed = self.sender.gpu().is_some();
        self
    }

    /// Sends a page, soon, as it is now. In an epoch each page is put once.
    pub(crate) fn put(&mut self, page: PageNumber) -> Result<(), MigrateError> {
        if self.before_asking == 0 {
            self.choose()?;
        }
        self.before_asking -= 1;
        let is_filling = self.gpu.as_ref().is_some_and(|gpu| gpu.filling.is_some());
        match is_filling {
            true => self.put_into_batch(page),
            false => self.put_by_core(page),
        }
    }

    /// Sends everything that was put.
    pub(crate) fn flush(&mut self) -> Result<(), MigrateError> {
        self.begin_batch()?;
        while self.finish_oldest()? {}
        self.sink.flush()
    }

    fn put_by_core(&mut self, page: PageNumber) -> Result<(), MigrateError> {
        self.ram.copy_page(page, &mut self.page);
        self.sink.put(page, &self.page)
    }

    /// Who gets the next pages.
    fn choose(&mut self) -> Result<(), MigrateError> {
        self.before_asking = BATCH;
        if !self.gpu_is_wanted() {
            // What is under way is done, or nearly.
            while self.finish_oldest()? {}
            return Ok(());
        }
        if self.gpu.is_none() && !self.open_gpu() {
            return Ok(());
        }
        if self.gpu.as_ref().is_some_and(|gpu| gpu.idle.is_empty()) {
            self.finish_oldest()?;
        }
        if let Some(gpu) = &mut self.gpu {
            let (pages, began, filled_in) =
                (Vec::with_capacity(BATCH), Instant::now(), Duration::ZERO);
            let batch = gpu.idle.pop();
            gpu.filling = batch.map(|batch| UnderWay { batch, pages, began, filled_in });
        }
        Ok(())
    }

    fn gpu_is_wanted(&self) -> bool {
        let Some(shared) = self.sender.gpu().filter(|_| self.may_feed) else { return false };
        let feed = &self.sender.feed;
        if feed.cores_are_short() {
            shared.look();
        }
        let left = feed.piece_bytes(BATCH_BYTES);
        let pays = || shared.is_always_used() || feed.gpu_pays(left, BATCH * PAGE_BYTES);
        shared.get().is_some() && pays()
    }

    /// Makes this thread's batches; says whether it has them.
    fn open_gpu(&mut self) -> bool {
        let found = self.sender.gpu().and_then(|shared| Some((shared, shared.get()?)));
        let has_room = available_memory().is_ok_and(|free| free / HOST_SHARE > PINNED);
        let may_enter = |(shared, _): &(&Arc<SharedGpu>, _)| has_room && shared.enter();
        let Some((shared, gpu)) = found.filter(may_enter) else {
            self.may_feed = false;
            return false;
        };
        let batches = (0..AT_ONCE).map(|_| Batch::new(gpu, BATCH)).collect::<Result<_, _>>();
        let opened = |idle| GpuFeeder { shared, idle, under_way: VecDeque::new(), filling: None };
        match batches {
            Ok(idle) => self.gpu = Some(opened(idle)),
            Err(error) => {
                self.may_feed = false;
                // Where others have room there it goes on with them.
                if shared.leave() {
                    shared.failed(&error);
                }
            }
        }
        self.gpu.is_some()
    }

    fn put_into_batch(&mut self, page: PageNumber) -> Result<(), MigrateError> {
        let Some(filling) = self.gpu.as_mut().and_then(|gpu| gpu.filling.as_mut()) else {
            return self.put_by_core(page);
        };
        match filling.batch.fill() {
            Ok(pages) => {
                let at = filling.pages.len() * PAGE_BYTES;
                self.ram.copy_page(page, &mut pages[at..at + PAGE_BYTES]);
                filling.pages.push(page);
            }
            Err(error) => {
                self.leave_gpu(&error, Vec::new())?;
                return self.put_by_core(page);
            }
        }
        match filling.pages.len() == BATCH {
            true => self.begin_batch(),
            false => Ok(()),
        }
    }

    /// Lets the GPU encode what was filled.
    fn begin_batch(&mut self) -> Result<(), MigrateError> {
        let Some(gpu) = &mut self.gpu else { return Ok(()) };
        let Some(mut filled) = gpu.filling.take() else { return Ok(()) };
        let count = filled.pages.len();
        if count == 0 {
            gpu.idle.push(filled.batch);
            return Ok(());
        }
        match filled.batch.begin(count, Encoding::Lz4, MOST_BLOCK_BYTES) {
            Ok(()) => {
                filled.filled_in = filled.began.elapsed();
                gpu.under_way.push_back(filled);
                Ok(())
            }
            Err(error) => self.leave_gpu(&error, filled.pages),
        }
    }

    /// Sends the pages of the batch that began first; says whether there was one.
    fn finish_oldest(&mut self) -> Result<bool, MigrateError> {
        let Some(gpu) = &mut self.gpu else { return Ok(false) };
        let Some(UnderWay { mut batch, pages, filled_in, .. }) = gpu.under_way.pop_front() else {
            return Ok(false);
        };
        let (began, waited) = (Instant::now(), self.sink.waited());
        let encoded = match batch.finish() {
            Ok(encoded) => encoded,
            Err(error) => return self.leave_gpu(&error, pages).map(|()| true),
        };
        let _ = self.sink.take_passed();
        let (mut read, mut made) = (0, 0);
        for (index, page) in pages.iter().enumerate() {
            let looked = LookedAt {
                is_zero: encoded.is_zero(index),
                fingerprint: encoded.hash(index),
                block: encoded.page(index),
            };
            if self.sink.put_looked_at(*page, encoded.plain(index), &looked)? {
                read += PAGE_BYTES;
                made += looked.block.map_or(0, <[u8]>::len);
            }
        }
        let waited = self.sink.waited() - waited;
        let took = filled_in + began.elapsed().saturating_sub(waited);
        // Pages that went otherwise are what any thread has to do.
        let took = took.mul_f64(read as f64 / (pages.len() * PAGE_BYTES) as f64);
        let (read, made, other) = (read as u64, made as u64, Duration::ZERO);
        let beside = self.sink.take_passed();
        self.sender.feed.learn_gpu(&Frame { read, made, took, other, beside });
        if let Some(gpu) = &mut self.gpu {
            gpu.shared.encoded(pages.len());
            gpu.idle.push(batch);
        }
        Ok(true)
    }

    /// Sends by itself what the GPU had: as it is now, which is as good as what it was then.
    fn leave_gpu(
        &mut self,
        error: &GpuError,
        mut pages: Vec<PageNumber>,
    ) -> Result<(), MigrateError> {
        if let Some(mut gpu) = self.gpu.take() {
            gpu.shared.failed(error);
            pages.extend(gpu.filling.take().into_iter().flat_map(|filling| filling.pages));
            pages.extend(gpu.under_way.drain(..).flat_map(|under_way| under_way.pages));
        }
        pages.into_iter().try_for_each(|page| self.put_by_core(page))
    }
}

impl Drop for GpuFeeder<'_> {
    fn drop(&mut self) {
        let _ = self.shared.leave();
    }
}
