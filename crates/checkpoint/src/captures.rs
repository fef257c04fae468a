//! Where dirty pages go: into a buffer, and past it where it is full.

use crate::CheckpointError;
use crate::buffer::CaptureBuffer;
use crate::overflow::Overflow;
use dewar_capture::{DirtySink, cores};
use dewar_image::ImageWriter;
use dewar_memory::{DirtyLease, Ram};
use dewar_units::{PAGE_BYTES, PageNumber, PageSet};
use std::time::Duration;

/// How long a guest that stands still waits for a store that is away.
const STOPPED_PATIENCE: Duration = Duration::from_secs(2);
/// Pages for which the pause finds room, at least: setting it aside takes time too.
const LEAST_ASIDE: usize = 2048;

/// What a capture has so far.
pub(crate) struct Captures<'t> {
    /// Every dirty set taken: a debt until the image exists.
    pub debt: Option<DirtyLease<'t>>,
    /// Copies of its pages.
    pub buffer: CaptureBuffer,
    /// Pages that the buffer had no room for, each time.
    pub overflowed: u64,
    /// Pages that went to the dirty store, each time they did.
    pub keyed: u64,
    /// Pages that were written before the pause and copied in it.
    pub stopped: u64,
}

impl<'t> Captures<'t> {
    /// An empty one; `debt` is what was taken to begin with.
    pub(crate) fn new(pages: u64, buffer_bytes: u64, debt: Option<DirtyLease<'t>>) -> Self {
        let limit = (buffer_bytes / PAGE_BYTES as u64).min(u64::from(u32::MAX - 1)) as usize;
        Self { debt, buffer: CaptureBuffer::new(pages, limit), overflowed: 0, keyed: 0, stopped: 0 }
    }

    /// Puts pages that the buffer has no room for.
    fn put_elsewhere(
        &mut self,
        left_over: &[PageNumber],
        ram: &Ram,
        overflow: &mut Overflow<'_, '_>,
    ) -> Result<(), CheckpointError> {
        let mut bytes = vec![0; PAGE_BYTES];
        for &page in left_over {
            self.overflowed += 1;
            ram.copy_page(page, &mut bytes);
            self.keyed += u64::from(overflow.put(page, &bytes)?);
        }
        Ok(())
    }

    /// Takes a set over as a debt.
    pub(crate) fn owe(&mut self, lease: DirtyLease<'t>) {
        match &mut self.debt {
            Some(debt) => debt.absorb(lease),
            none => *none = Some(lease),
        }
    }

    /// Captures what was written, while the guest stands still.
    pub(crate) fn capture_stopped(
        &mut self,
        pages: &PageSet,
        ram: &Ram,
        writer: &ImageWriter<'_>,
    ) -> Result<(), CheckpointError> {
        self.stopped = pages.count();
        writer.expect(pages);
        let left_over = self.buffer.capture_stopped(ram, pages, cores());
        if left_over.is_empty() {
            return Ok(());
        }
        // Not to the dirty store, and not for long to a store that is away.
        writer.set_patience(STOPPED_PATIENCE);
        let mut put = || -> Result<(), CheckpointError> {
            let mut overflow = Overflow::image(writer)?;
            self.put_elsewhere(&left_over, ram, &mut overflow)?;
            overflow.finish()
        };
        let done = put();
        writer.set_patience(Duration::MAX);
        done
    }
}

/// Captures what epochs find written: what the buffer has no room for goes past it at once.
pub(crate) struct EpochSink<'c, 't, 'w, 's> {
    pub captures: &'c mut Captures<'t>,
    pub ram: &'c Ram,
    pub writer: &'w ImageWriter<'s>,
    pub overflow: Overflow<'w, 's>,
}

impl<'t> DirtySink<'t> for EpochSink<'_, 't, '_, '_> {
    type Error = CheckpointError;

    fn capture(&mut self, lease: DirtyLease<'t>) -> Result<(), CheckpointError> {
        self.writer.expect(lease.pages());
        let left_over = self.captures.buffer.capture(self.ram, lease.pages(), cores());
        self.captures.put_elsewhere(&left_over, self.ram, &mut self.overflow)?;
        self.captures.owe(lease);
        self.overflow.flush()
    }

    fn make_room(&mut self, dirty_pages: u64) {
        self.captures.buffer.set_aside(2 * dirty_pages as usize + LEAST_ASIDE);
    }
}
