//! Memory of the driver's own that both sides reach: copies between it and the device need no copy by the driver.

use crate::GpuError;
use opencl3::command_queue::CommandQueue;
use opencl3::context::Context;
use opencl3::memory::{
    Buffer, CL_MAP_READ, CL_MAP_WRITE, CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_WRITE, ClMem,
};
use opencl3::types::CL_BLOCKING;
use std::ptr::null_mut;

/// Bytes in pinned memory, mapped here as long as they live.
///
/// The invariant: the buffer is mapped at `start` from the beginning to the end, no kernel is given it, and a
/// copy that the device makes from or to it is waited for before it is touched here again. ([`Batch`](crate::Batch)
/// sees to the last.)
pub(crate) struct Staging {
    buffer: Buffer<u8>,
    start: *mut u8,
    length: usize,
}

// SAFETY: nothing of it belongs to a thread: OpenCL's buffers may be used by any (OpenCL 1.2, appendix A.2), and
// the mapping is memory of the process.
unsafe impl Send for Staging {}

impl Staging {
    pub(crate) fn new(
        context: &Context,
        queue: &CommandQueue,
        length: usize,
    ) -> Result<Self, GpuError> {
        let flags = CL_MEM_ALLOC_HOST_PTR | CL_MEM_READ_WRITE;
        // SAFETY: without CL_MEM_USE_HOST_PTR no pointer of ours is kept.
        let buffer = unsafe { Buffer::create(context, flags, length, null_mut()) }
            .map_err(GpuError::of("pin memory"))?;
        let mut start = null_mut();
        // SAFETY: the whole buffer is mapped, once, and nothing of it is in use yet; the call waits.
        unsafe {
            queue.enqueue_map_buffer(
                &buffer,
                CL_BLOCKING,
                CL_MAP_READ | CL_MAP_WRITE,
                0,
                length,
                &mut start,
                &[],
            )
        }
        .map_err(GpuError::of("map pinned memory"))?;
        Ok(Self { buffer, start: start.cast(), length })
    }

    pub(crate) fn slice(&self) -> &[u8] {
        // SAFETY: see the invariant; it stays mapped while this value is borrowed.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    pub(crate) fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }

    /// Gives the mapping back. Nothing may be under way with it.
    pub(crate) fn unmap(&mut self, queue: &CommandQueue) {
        // SAFETY: it was mapped there, and nobody uses it after this.
        let _ =
            unsafe { queue.enqueue_unmap_mem_object(self.buffer.get(), self.start.cast(), &[]) };
        self.length = 0;
    }
}
