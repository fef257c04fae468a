//! What a batch needs of a device, whichever interface its driver has.

use crate::GpuError;
use crate::kernel::Kernel;

/// Memory of the device: which one of its queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceMemory(pub(crate) usize);

/// Memory of the driver's own that both sides reach: copies between it and the device need no copy by the driver.
///
/// The invariant: so many bytes begin at `start`, nobody else has them, and they stay until the queue that gave
/// them ends. [`Batch`](crate::Batch) keeps both together, and touches none that a copy is under way with.
pub(crate) struct Pinned {
    start: *mut u8,
    length: usize,
}

/// What a kernel is given.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Argument {
    Memory(DeviceMemory),
    Number(u32),
}

/// A queue of commands of one device, which works in order, and the memory that they use. It must not be dropped
/// while something is under way.
pub(crate) trait Queue: Send {
    /// Makes room on the device.
    fn allocate(&mut self, bytes: usize) -> Result<DeviceMemory, GpuError>;

    /// Makes room here.
    fn pin(&mut self, bytes: usize) -> Result<Pinned, GpuError>;

    /// Copies so many bytes to the device.
    ///
    /// # Safety
    /// Both sides must have so many, and nobody may touch ours until `wait` has come back.
    // SAFETY: as said.
    unsafe fn copy_there(
        &mut self,
        to: DeviceMemory,
        from: &Pinned,
        bytes: usize,
    ) -> Result<(), GpuError>;

    /// Copies so many bytes from the device.
    ///
    /// # Safety
    /// As for the other direction.
    // SAFETY: as said.
    unsafe fn copy_back(
        &mut self,
        from: DeviceMemory,
        to: &mut Pinned,
        bytes: usize,
    ) -> Result<(), GpuError>;

    /// Runs a kernel in so many groups of so many items each.
    ///
    /// # Safety
    /// The arguments must be those of the kernel, in its order, and what it writes must fit them.
    // SAFETY: as said.
    unsafe fn run(
        &mut self,
        kernel: Kernel,
        arguments: &[Argument],
        groups: usize,
        items: usize,
    ) -> Result<(), GpuError>;

    /// Sees to it that what was given is begun.
    fn start(&mut self) -> Result<(), GpuError>;

    /// Waits for all that was given, and says whether something of it failed.
    fn wait(&mut self) -> Result<(), GpuError>;
}

// SAFETY: nothing of it belongs to a thread, and nobody else has its bytes.
unsafe impl Send for Pinned {}

impl Pinned {
    /// So many bytes that begin there.
    ///
    /// # Safety
    /// They must be as the invariant says, and hold a value.
    // SAFETY: as said.
    pub(crate) unsafe fn new(start: *mut u8, length: usize) -> Self {
        Self { start, length }
    }

    pub(crate) fn slice(&self) -> &[u8] {
        // SAFETY: see the invariant.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    pub(crate) fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and it is borrowed by its only owner.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }
}
