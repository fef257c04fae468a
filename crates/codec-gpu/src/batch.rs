//! A batch of pages on its way through the device.
//!
//! ```text
//! fill pages -> begin: copied there, looked at, measured, placed -> finish: written densely, copied back
//! ```
//!
//! All commands of a batch are in one queue, which works in order; so each sees what those before it made. Between
//! `begin` and `finish` nobody can reach the memory that is being copied: `finish` alone gives the batch back.

use crate::staging::Staging;
use crate::{Gpu, GpuError};
use dewar_units::PAGE_BYTES;
use opencl3::command_queue::CommandQueue;
use opencl3::event::Event;
use opencl3::kernel::{ExecuteKernel, Kernel};
use opencl3::memory::{Buffer, CL_MEM_READ_ONLY, CL_MEM_READ_WRITE};
use opencl3::types::{CL_BLOCKING, CL_NON_BLOCKING};
use std::ptr::null_mut;

/// Items that work on one page as words, and on eight pages for their hash.
const ITEMS: usize = 64;
const PAGES_LOOKED_AT: usize = ITEMS / 8;
/// Items that add up the sizes of a batch.
const PLACING: usize = 256;
/// Halves of words in the map of a page's words.
const MAP_HALVES: usize = 16;

/// How the pages of a batch are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// As the words that differ from the word before.
    Runs,
    /// As the words that differ from the version of the page that is present.
    Deltas,
    /// As an LZ4 block for each page.
    Lz4,
}

/// Room for so many pages here and on the device. Dropped, it waits for what is under way.
pub struct Batch<'g> {
    gpu: &'g Gpu,
    queue: CommandQueue,
    capacity: usize,
    pages: Staging,
    present: Staging,
    on_device: OnDevice,
    results: Results,
    /// What is under way. A command that failed is told by its event alone.
    events: Vec<Event>,
    begun: Option<Begun>,
}

/// A batch under way.
struct Begun {
    count: usize,
    encoding: Encoding,
    most: usize,
}

/// The device's side of a batch.
struct OnDevice {
    pages: Buffer<u8>,
    present: Buffer<u8>,
    maps: Buffer<u32>,
    room: Buffer<u8>,
    sizes: Buffer<u32>,
    starts: Buffer<u32>,
    hashes: Buffer<u64>,
    zeros: Buffer<u8>,
    bytes: Buffer<u8>,
}

/// What comes back.
struct Results {
    starts: Vec<u32>,
    hashes: Vec<u64>,
    zeros: Vec<u8>,
    bytes: Staging,
}

/// An encoded batch.
pub struct Encoded<'b> {
    results: &'b Results,
    count: usize,
}

impl std::fmt::Debug for Batch<'_> {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("Batch").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Encoded<'_> {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("Encoded").field("count", &self.count).finish_non_exhaustive()
    }
}

impl OnDevice {
    fn new(gpu: &Gpu, capacity: usize) -> Result<Self, GpuError> {
        let all = capacity * PAGE_BYTES;
        Ok(Self {
            pages: buffer(gpu, CL_MEM_READ_ONLY, all)?,
            present: buffer(gpu, CL_MEM_READ_ONLY, all)?,
            maps: buffer(gpu, CL_MEM_READ_WRITE, capacity * MAP_HALVES)?,
            room: buffer(gpu, CL_MEM_READ_WRITE, all)?,
            sizes: buffer(gpu, CL_MEM_READ_WRITE, capacity)?,
            starts: buffer(gpu, CL_MEM_READ_WRITE, capacity + 1)?,
            hashes: buffer(gpu, CL_MEM_READ_WRITE, capacity)?,
            zeros: buffer(gpu, CL_MEM_READ_WRITE, capacity)?,
            bytes: buffer(gpu, CL_MEM_READ_WRITE, all)?,
        })
    }
}

fn buffer<T>(gpu: &Gpu, flags: u64, length: usize) -> Result<Buffer<T>, GpuError> {
    // SAFETY: without CL_MEM_USE_HOST_PTR no pointer of ours is kept.
    unsafe { Buffer::create(&gpu.context, flags, length, null_mut()) }
        .map_err(GpuError::of("make room on the device"))
}

impl<'g> Batch<'g> {
    /// Room for so many pages: for each, three pages of pinned memory and four on the device.
    ///
    /// # Errors
    /// Where there is none.
    ///
    /// # Panics
    /// Where there is no page, or their bytes do not fit into 32 bits.
    pub fn new(gpu: &'g Gpu, capacity: usize) -> Result<Self, GpuError> {
        let bytes = capacity.checked_mul(PAGE_BYTES).and_then(|bytes| u32::try_from(bytes).ok());
        assert!(bytes.is_some_and(|bytes| bytes > 0));
        let queue =
            CommandQueue::create_default(&gpu.context, 0).map_err(GpuError::of("make a queue"))?;
        let staging = || Staging::new(&gpu.context, &queue, capacity * PAGE_BYTES);
        let results = Results {
            starts: vec![0; capacity + 1],
            hashes: vec![0; capacity],
            zeros: vec![0; capacity],
            bytes: staging()?,
        };
        let (pages, present) = (staging()?, staging()?);
        let on_device = OnDevice::new(gpu, capacity)?;
        Ok(Self {
            gpu,
            queue,
            capacity,
            pages,
            present,
            on_device,
            results,
            events: Vec::new(),
            begun: None,
        })
    }

    /// How many pages it has room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Where the pages go, one behind the other; for [`Encoding::Deltas`] what is present goes into the second
    /// at the same places. Waits for what is under way.
    ///
    /// # Errors
    /// Where the device failed.
    pub fn fill(&mut self) -> Result<(&mut [u8], &mut [u8]), GpuError> {
        self.wait()?;
        Ok((self.pages.slice_mut(), self.present.slice_mut()))
    }

    /// Begins to encode the first `count` pages. One that would take more than `most` bytes, which are a page's
    /// at most, is not.
    ///
    /// # Errors
    /// Where the device fails.
    ///
    /// # Panics
    /// Where there are not so many pages, or `most` is more than a page.
    pub fn begin(&mut self, count: usize, encoding: Encoding, most: usize) -> Result<(), GpuError> {
        assert!((1..=self.capacity).contains(&count) && most <= PAGE_BYTES);
        self.wait()?;
        let copied = count * PAGE_BYTES;
        let failed = GpuError::of("copy to the device");
        let there = &mut self.on_device;
        // SAFETY: the buffers are as long; nobody touches the pages until `wait`, which every way to them calls.
        unsafe {
            let (to, from) = (&mut there.pages, &self.pages.slice()[..copied]);
            let copy = self.queue.enqueue_write_buffer(to, CL_NON_BLOCKING, 0, from, &[]);
            self.events.push(copy.map_err(&failed)?);
            if encoding == Encoding::Deltas {
                let (to, from) = (&mut there.present, &self.present.slice()[..copied]);
                let copy = self.queue.enqueue_write_buffer(to, CL_NON_BLOCKING, 0, from, &[]);
                self.events.push(copy.map_err(&failed)?);
            }
        }
        let (pages, limit) = (count as u32, most as u32);
        let looked = self.look(count)?;
        let measured = match encoding {
            Encoding::Lz4 => self.compress(pages, limit)?,
            _ => self.measure(count, encoding, limit)?,
        };
        let placed = self.place(pages)?;
        self.events.extend([looked, measured, placed]);
        self.queue.flush().map_err(GpuError::of("start a batch"))?;
        self.begun = Some(Begun { count, encoding, most });
        Ok(())
    }

    fn look(&self, count: usize) -> Result<Event, GpuError> {
        let (kernel, there, pages) = (self.kernel("look")?, &self.on_device, count as u32);
        let mut run = ExecuteKernel::new(&kernel);
        // SAFETY: the arguments are those of the kernel, in its order; it writes a number and a byte for each of
        // so many pages.
        unsafe {
            run.set_arg(&there.pages).set_arg(&pages);
            run.set_arg(&there.hashes).set_arg(&there.zeros);
            self.run(&mut run, count.div_ceil(PAGES_LOOKED_AT) * ITEMS, ITEMS)
        }
    }

    fn measure(&self, count: usize, encoding: Encoding, most: u32) -> Result<Event, GpuError> {
        let (kernel, there) = (self.kernel("measure_words")?, &self.on_device);
        let is_delta = u32::from(encoding == Encoding::Deltas);
        let mut run = ExecuteKernel::new(&kernel);
        // SAFETY: the arguments are those of the kernel, in its order; it writes a map and a size for each page.
        unsafe {
            run.set_arg(&there.pages).set_arg(&there.present).set_arg(&is_delta).set_arg(&most);
            run.set_arg(&there.maps).set_arg(&there.sizes);
            self.run(&mut run, count * ITEMS, ITEMS)
        }
    }

    fn compress(&self, pages: u32, most: u32) -> Result<Event, GpuError> {
        let (kernel, there) = (self.kernel("lz4")?, &self.on_device);
        let mut run = ExecuteKernel::new(&kernel);
        // SAFETY: the arguments are those of the kernel, in its order; it writes at most `most` bytes, no more
        // than a page, into the room of each page.
        unsafe {
            run.set_arg(&there.pages).set_arg(&pages).set_arg(&most);
            run.set_arg(&there.room).set_arg(&there.sizes);
            self.run(&mut run, (pages as usize).div_ceil(ITEMS) * ITEMS, ITEMS)
        }
    }

    fn place(&self, pages: u32) -> Result<Event, GpuError> {
        let (kernel, there) = (self.kernel("place")?, &self.on_device);
        let mut run = ExecuteKernel::new(&kernel);
        // SAFETY: the arguments are those of the kernel, in its order; it writes one number more than there are
        // pages, for which there is room.
        unsafe {
            run.set_arg(&there.sizes).set_arg(&pages).set_arg(&there.starts);
            self.run(&mut run, PLACING, PLACING)
        }
    }

    /// Waits for the batch, and gives what came of it: nothing where none was begun.
    ///
    /// # Errors
    /// Where the device failed.
    pub fn finish(&mut self) -> Result<Encoded<'_>, GpuError> {
        let Some(Begun { count, encoding, most }) = self.begun.take() else {
            return Ok(Encoded { results: &self.results, count: 0 });
        };
        self.require_done()?;
        let failed = GpuError::of("copy from the device");
        let (there, results) = (&self.on_device, &mut self.results);
        // SAFETY: each call waits, and both sides have as many numbers.
        unsafe {
            let starts = &mut results.starts[..=count];
            self.queue
                .enqueue_read_buffer(&there.starts, CL_BLOCKING, 0, starts, &[])
                .map_err(&failed)?;
            let hashes = &mut results.hashes[..count];
            self.queue
                .enqueue_read_buffer(&there.hashes, CL_BLOCKING, 0, hashes, &[])
                .map_err(&failed)?;
            let zeros = &mut results.zeros[..count];
            self.queue
                .enqueue_read_buffer(&there.zeros, CL_BLOCKING, 0, zeros, &[])
                .map_err(&failed)?;
        }
        let starts = &self.results.starts[..=count];
        let fits = |pair: &[u32]| pair[0] <= pair[1] && (pair[1] - pair[0]) as usize <= most;
        if starts[0] != 0 || !starts.windows(2).all(fits) {
            return Err(GpuError::Nonsense(self.gpu.name().to_owned()));
        }
        let length = starts[count] as usize;
        if length > 0 {
            let written = self.write(count, encoding)?;
            self.events.push(written);
            self.require_done()?;
            let bytes = &mut self.results.bytes.slice_mut()[..length];
            // SAFETY: the call waits; no page takes more than a page, so there is room for all on both sides.
            unsafe {
                self.queue.enqueue_read_buffer(&self.on_device.bytes, CL_BLOCKING, 0, bytes, &[])
            }
            .map_err(&failed)?;
        }
        Ok(Encoded { results: &self.results, count })
    }

    /// Waits for what was given to the device, and says which of it failed.
    fn require_done(&mut self) -> Result<(), GpuError> {
        let events = std::mem::take(&mut self.events);
        events.iter().try_for_each(|event| event.wait()).map_err(GpuError::of("encode a batch"))
    }

    /// Writes what each page takes behind what those before it take.
    fn write(&self, count: usize, encoding: Encoding) -> Result<Event, GpuError> {
        let there = &self.on_device;
        let is_lz4 = encoding == Encoding::Lz4;
        let kernel = self.kernel(if is_lz4 { "write_blocks" } else { "write_words" })?;
        let mut run = ExecuteKernel::new(&kernel);
        // SAFETY: the arguments are those of the kernel, in its order; it writes to the places that `place` gave
        // to what was measured of the same pages.
        unsafe {
            match is_lz4 {
                true => run.set_arg(&there.room),
                false => run.set_arg(&there.pages).set_arg(&there.maps),
            };
            run.set_arg(&there.starts).set_arg(&there.bytes);
            self.run(&mut run, count * ITEMS, ITEMS)
        }
    }

    fn kernel(&self, name: &'static str) -> Result<Kernel, GpuError> {
        Kernel::create(&self.gpu.program, name).map_err(GpuError::of("find a kernel"))
    }

    /// Runs a kernel on so many work-items, in groups of so many.
    ///
    /// # Safety
    /// The arguments must be those of the kernel, and what it writes must fit them.
    // SAFETY: each caller says why that is so.
    unsafe fn run(
        &self,
        run: &mut ExecuteKernel<'_>,
        items: usize,
        together: usize,
    ) -> Result<Event, GpuError> {
        run.set_global_work_size(items).set_local_work_size(together);
        // SAFETY: by the caller.
        unsafe { run.enqueue_nd_range(&self.queue) }.map_err(GpuError::of("run a kernel"))
    }

    /// Waits for what is under way, and drops it.
    fn wait(&mut self) -> Result<(), GpuError> {
        self.begun = None;
        self.events.clear();
        self.queue.finish().map_err(GpuError::of("wait for the device"))
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        let _ = self.wait();
        for staging in [&mut self.pages, &mut self.present, &mut self.results.bytes] {
            staging.unmap(&self.queue);
        }
        let _ = self.queue.finish();
    }
}

impl Encoded<'_> {
    /// How many pages there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// What a page takes; nothing where that would be too much.
    #[must_use]
    ///
    /// # Panics
    /// Where there is no such page, as the two below.
    pub fn page(&self, index: usize) -> Option<&[u8]> {
        assert!(index < self.count);
        let place = |index: usize| self.results.starts[index] as usize;
        let bytes = &self.results.bytes.slice()[place(index)..place(index + 1)];
        (!bytes.is_empty()).then_some(bytes)
    }

    /// Whether a page is zero.
    #[must_use]
    pub fn is_zero(&self, index: usize) -> bool {
        self.results.zeros[..self.count][index] != 0
    }

    /// XXH3 of 64 bits of a page.
    #[must_use]
    pub fn hash(&self, index: usize) -> u64 {
        self.results.hashes[..self.count][index]
    }
}
