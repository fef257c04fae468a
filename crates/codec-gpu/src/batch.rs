//! A batch of pages on its way through the device.
//!
//! ```text
//! fill pages -> begin: copied there, looked at, measured, placed, written densely -> finish: copied back
//! ```
//!
//! All commands of a batch are in one queue, which works in order; so each sees what those before it made. Between
//! `begin` and `finish` nobody can reach the memory that is being copied: `finish` alone gives the batch back.

use crate::kernel::Kernel;
use crate::queue::{Argument, DeviceMemory, Pinned, Queue};
use crate::{Gpu, GpuError};
use dewar_units::PAGE_BYTES;

/// Items that work on one page as words, and on eight pages for their hash.
const ITEMS: usize = 64;
const PAGES_LOOKED_AT: usize = ITEMS / 8;
/// Items that work on four pages as LZ4.
const ITEMS_OF_LZ4: usize = 32;
const PAGES_OF_LZ4: usize = 4;
/// Items that add up the sizes of a batch.
const PLACING: usize = 256;
/// Bytes of the map of a page's words.
const MAP_BYTES: usize = 64;

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
    queue: Box<dyn Queue + 'g>,
    capacity: usize,
    pages: Pinned,
    /// Made when it is first needed.
    present: Option<Present>,
    on_device: OnDevice,
    results: Results,
    begun: Option<Begun>,
    is_idle: bool,
}

/// The versions that are present, on both sides.
struct Present {
    here: Pinned,
    on_device: DeviceMemory,
}

/// A batch under way.
struct Begun {
    count: usize,
    most: usize,
}

/// The device's side of a batch.
struct OnDevice {
    pages: DeviceMemory,
    maps: DeviceMemory,
    room: DeviceMemory,
    sizes: DeviceMemory,
    starts: DeviceMemory,
    hashes: DeviceMemory,
    zeros: DeviceMemory,
    bytes: DeviceMemory,
}

/// What comes back.
struct Results {
    /// Numbers of 4 bytes.
    starts: Pinned,
    /// Numbers of 8 bytes.
    hashes: Pinned,
    zeros: Pinned,
    bytes: Pinned,
}

/// An encoded batch.
pub struct Encoded<'b> {
    results: &'b Results,
    pages: &'b [u8],
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
    fn new(queue: &mut dyn Queue, capacity: usize) -> Result<Self, GpuError> {
        let all = capacity * PAGE_BYTES;
        Ok(Self {
            pages: queue.allocate(all)?,
            maps: queue.allocate(capacity * MAP_BYTES)?,
            room: queue.allocate(all)?,
            sizes: queue.allocate(capacity * 4)?,
            starts: queue.allocate((capacity + 1) * 4)?,
            hashes: queue.allocate(capacity * 8)?,
            zeros: queue.allocate(capacity)?,
            bytes: queue.allocate(all)?,
        })
    }
}

impl<'g> Batch<'g> {
    /// Room for so many pages: for each, two pages of pinned memory and three on the device, and one more of both
    /// for deltas.
    ///
    /// # Errors
    /// Where there is none.
    ///
    /// # Panics
    /// Where there is no page, or their bytes do not fit into 32 bits.
    pub fn new(gpu: &'g Gpu, capacity: usize) -> Result<Self, GpuError> {
        let bytes = capacity.checked_mul(PAGE_BYTES).and_then(|bytes| u32::try_from(bytes).ok());
        assert!(bytes.is_some_and(|bytes| bytes > 0));
        let mut queue = gpu.queue()?;
        let results = Results {
            starts: queue.pin((capacity + 1) * 4)?,
            hashes: queue.pin(capacity * 8)?,
            zeros: queue.pin(capacity)?,
            bytes: queue.pin(capacity * PAGE_BYTES)?,
        };
        let pages = queue.pin(capacity * PAGE_BYTES)?;
        let on_device = OnDevice::new(&mut *queue, capacity)?;
        let (present, begun, is_idle) = (None, None, true);
        Ok(Self { gpu, queue, capacity, pages, present, on_device, results, begun, is_idle })
    }

    /// How many pages it has room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Where the pages go, one behind the other. Waits for what is under way.
    ///
    /// # Errors
    /// Where the device failed.
    pub fn fill(&mut self) -> Result<&mut [u8], GpuError> {
        self.wait()?;
        Ok(self.pages.slice_mut())
    }

    /// Where what is present goes, for [`Encoding::Deltas`]: at the same places. Waits for what is under way.
    ///
    /// # Errors
    /// Where the device failed, or has no room for it.
    pub fn fill_present(&mut self) -> Result<&mut [u8], GpuError> {
        self.wait()?;
        let bytes = self.capacity * PAGE_BYTES;
        let present = match self.present.take() {
            Some(present) => present,
            None => {
                Present { here: self.queue.pin(bytes)?, on_device: self.queue.allocate(bytes)? }
            }
        };
        Ok(self.present.insert(present).here.slice_mut())
    }

    /// Begins to encode the first `count` pages. One that would take more than `most` bytes, which are a page's
    /// at most, is not.
    ///
    /// # Errors
    /// Where the device fails.
    ///
    /// # Panics
    /// Where there are not so many pages, `most` is more than a page, or deltas are to be made from nothing.
    pub fn begin(&mut self, count: usize, encoding: Encoding, most: usize) -> Result<(), GpuError> {
        assert!((1..=self.capacity).contains(&count) && most <= PAGE_BYTES);
        self.wait()?;
        self.is_idle = false;
        let present = match encoding {
            Encoding::Deltas => Some(self.present.as_ref().expect("what is present was filled in")),
            Encoding::Runs | Encoding::Lz4 => None,
        };
        let (queue, there) = (&mut *self.queue, &self.on_device);
        // SAFETY: the buffers are as long; nobody touches the pages until `wait`, which every way to them calls.
        unsafe {
            queue.copy_there(there.pages, &self.pages, count * PAGE_BYTES)?;
            if let Some(present) = present {
                queue.copy_there(present.on_device, &present.here, count * PAGE_BYTES)?;
            }
        }
        let base = present.map(|present| present.on_device);
        encode(queue, there, base, count, encoding, most)?;
        let results = &mut self.results;
        // SAFETY: both sides have as many numbers, and nobody looks at ours before `wait`.
        unsafe {
            queue.copy_back(there.starts, &mut results.starts, (count + 1) * 4)?;
            queue.copy_back(there.hashes, &mut results.hashes, count * 8)?;
            queue.copy_back(there.zeros, &mut results.zeros, count)?;
        }
        queue.start()?;
        self.begun = Some(Begun { count, most });
        Ok(())
    }

    /// Waits for the batch, and gives what came of it: nothing where none was begun.
    ///
    /// # Errors
    /// Where the device failed.
    pub fn finish(&mut self) -> Result<Encoded<'_>, GpuError> {
        let Some(Begun { count, most }) = self.begun.take() else {
            return Ok(Encoded { results: &self.results, pages: &[], count: 0 });
        };
        self.queue.wait()?;
        let start = |index: usize| self.results.start(index);
        let fits = |page: usize| (start(page)..=start(page) + most).contains(&start(page + 1));
        if start(0) != 0 || !(0..count).all(fits) {
            return Err(GpuError::Nonsense(self.gpu.name().to_owned()));
        }
        let length = start(count);
        if length > 0 {
            // SAFETY: no page takes more than a page, so there is room for all on both sides; it is waited for.
            unsafe {
                let bytes = &mut self.results.bytes;
                self.queue.copy_back(self.on_device.bytes, bytes, length)?;
            }
            self.queue.wait()?;
        }
        self.is_idle = true;
        let pages = &self.pages.slice()[..count * PAGE_BYTES];
        Ok(Encoded { results: &self.results, pages, count })
    }

    /// Waits for what is under way, and drops it.
    fn wait(&mut self) -> Result<(), GpuError> {
        self.begun = None;
        if !self.is_idle {
            self.queue.wait()?;
            self.is_idle = true;
        }
        Ok(())
    }
}

/// Looks at the pages that were copied there, and writes what each takes behind what those before it take.
fn encode(
    queue: &mut dyn Queue,
    there: &OnDevice,
    present: Option<DeviceMemory>,
    count: usize,
    encoding: Encoding,
    most: usize,
) -> Result<(), GpuError> {
    let OnDevice { pages, maps, room, sizes, starts, hashes, zeros, bytes } = *there;
    let memory = Argument::Memory;
    let (all, limit) = (Argument::Number(count as u32), Argument::Number(most as u32));
    let is_delta = Argument::Number(u32::from(present.is_some()));
    // SAFETY: the arguments are those of each kernel, in its order. Each writes a number, a byte, a map, or at
    // most `most` bytes, which are no more than a page, for each of so many pages; `place` one number more. The
    // last writes to the places that `place` gave to what was measured of the same pages.
    unsafe {
        let looking = count.div_ceil(PAGES_LOOKED_AT);
        let look = [memory(pages), all, memory(hashes), memory(zeros)];
        queue.run(Kernel::Look, &look, looking, ITEMS)?;
        if encoding == Encoding::Lz4 {
            let lz4 = [memory(pages), all, limit, memory(room), memory(sizes)];
            queue.run(Kernel::Lz4, &lz4, count.div_ceil(PAGES_OF_LZ4), ITEMS_OF_LZ4)?;
        } else {
            // Without a delta it is not looked at.
            let (pages, present) = (memory(pages), memory(present.unwrap_or(pages)));
            let measure = [pages, present, is_delta, limit, memory(maps), memory(sizes)];
            queue.run(Kernel::MeasureWords, &measure, count, ITEMS)?;
        }
        queue.run(Kernel::Place, &[memory(sizes), all, memory(starts)], 1, PLACING)?;
        if encoding == Encoding::Lz4 {
            let write = [memory(room), memory(starts), memory(bytes)];
            queue.run(Kernel::WriteBlocks, &write, count, ITEMS)
        } else {
            let write = [memory(pages), memory(maps), memory(starts), memory(bytes)];
            queue.run(Kernel::WriteWords, &write, count, ITEMS)
        }
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

impl Results {
    /// Where the bytes of a page begin; behind the last page, where all end.
    fn start(&self, page: usize) -> usize {
        u32::from_le_bytes(number(&self.starts, page)) as usize
    }
}

/// One of the numbers that lie one behind the other.
fn number<const BYTES: usize>(from: &Pinned, index: usize) -> [u8; BYTES] {
    std::array::from_fn(|byte| from.slice()[index * BYTES + byte])
}

impl<'b> Encoded<'b> {
    /// How many pages there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// A page as it was put in.
    ///
    /// # Panics
    /// Where there is no such page, as the three below.
    #[must_use]
    pub fn plain(&self, index: usize) -> &'b [u8] {
        &self.pages[index * PAGE_BYTES..][..PAGE_BYTES]
    }

    /// What a page takes; nothing where that would be too much.
    #[must_use]
    pub fn page(&self, index: usize) -> Option<&'b [u8]> {
        assert!(index < self.count);
        let bytes =
            &self.results.bytes.slice()[self.results.start(index)..self.results.start(index + 1)];
        (!bytes.is_empty()).then_some(bytes)
    }

    /// Whether a page is zero.
    #[must_use]
    pub fn is_zero(&self, index: usize) -> bool {
        self.results.zeros.slice()[..self.count][index] != 0
    }

    /// XXH3 of 64 bits of a page.
    #[must_use]
    pub fn hash(&self, index: usize) -> u64 {
        assert!(index < self.count);
        u64::from_le_bytes(number(&self.results.hashes, index))
    }
}
