//! Devices of OpenCL.
//!
//! opencl3 panics where a driver does not take an object back, as one may whose device has failed. So nothing
//! is given back after a failure: the device is used no more, and the driver ends with the command.

use crate::GpuError;
use crate::kernel::{Kernel, OPENCL_C};
use crate::queue::{Argument, DeviceMemory, Pinned, Queue};
use opencl3::command_queue::CommandQueue;
use opencl3::context::Context;
use opencl3::device::Device;
use opencl3::error_codes::{CL_PLATFORM_NOT_FOUND_KHR, ClError, DLOPEN_RUNTIME_LOAD_FAILED};
use opencl3::event::Event;
use opencl3::kernel::Kernel as OpenClKernel;
use opencl3::memory::{
    Buffer, CL_MAP_READ, CL_MAP_WRITE, CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_WRITE, ClMem,
};
use opencl3::platform::{Platform, get_platforms};
use opencl3::program::Program;
use opencl3::types::{CL_BLOCKING, CL_NON_BLOCKING};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A device with the kernels in it.
pub(crate) struct OpenClDevice {
    pub(crate) name: String,
    context: ManuallyDrop<Context>,
    program: ManuallyDrop<Program>,
    has_failed: AtomicBool,
}

/// The first device of each driver that is of this kind; none where there is no OpenCL.
pub(crate) fn devices(kind: u64) -> Vec<Result<OpenClDevice, GpuError>> {
    let _turn = one_at_a_time();
    let platforms = match platforms() {
        Ok(platforms) => platforms,
        Err(error) => return vec![Err(error)],
    };
    let first = |platform| OpenClDevice::first(platform, kind).transpose();
    platforms.iter().filter_map(first).collect()
}

/// Loaders of drivers have been seen to find none where two threads ask for the first time at once, and PoCL 5 to
/// abort where two gave kernels back.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn platforms() -> Result<Vec<Platform>, GpuError> {
    match get_platforms() {
        Err(ClError(DLOPEN_RUNTIME_LOAD_FAILED | CL_PLATFORM_NOT_FOUND_KHR)) => Ok(Vec::new()),
        other => other.map_err(failed("list drivers")),
    }
}

fn failed(operation: &'static str) -> impl Fn(ClError) -> GpuError {
    move |cause| GpuError::OpenCl { operation, cause }
}

impl OpenClDevice {
    /// The first device of a driver that is one of this kind.
    fn first(platform: &Platform, kind: u64) -> Result<Option<Self>, GpuError> {
        let found = platform.get_devices(kind).map_err(failed("list devices"))?;
        found.first().map(|device| Self::open(&Device::new(*device))).transpose()
    }

    fn open(device: &Device) -> Result<Self, GpuError> {
        let name = device.name().map_err(failed("name a device"))?.trim().to_owned();
        if !device.endian_little().map_err(failed("describe a device"))? {
            return Err(GpuError::BigEndian(name));
        }
        let context = Context::from_device(device).map_err(failed("use a device"))?;
        let program = Program::create_and_build_from_source(&context, OPENCL_C, "-cl-std=CL1.2")
            .map_err(|log| GpuError::Kernels { device: name.clone(), log })?;
        let (context, program) = (ManuallyDrop::new(context), ManuallyDrop::new(program));
        Ok(Self { name, context, program, has_failed: AtomicBool::new(false) })
    }

    /// The error of an operation after which nothing is given back.
    fn failed(&self, operation: &'static str) -> impl Fn(ClError) -> GpuError + '_ {
        move |cause| {
            self.has_failed.store(true, Ordering::Relaxed);
            failed(operation)(cause)
        }
    }

    pub(crate) fn queue(&self) -> Result<OpenClQueue<'_>, GpuError> {
        let _turn = one_at_a_time();
        let queue =
            CommandQueue::create_default(&self.context, 0).map_err(self.failed("make a queue"))?;
        let kernels = Kernel::ALL
            .into_iter()
            .map(|kernel| OpenClKernel::create(&self.program, kernel.name()))
            .collect::<Result<_, _>>()
            .map_err(self.failed("find a kernel"))?;
        let (memory, pinned, events) = (Vec::new(), Vec::new(), Vec::new());
        let objects = QueueObjects { queue, kernels, memory, pinned, events };
        Ok(OpenClQueue { device: self, objects: ManuallyDrop::new(objects) })
    }
}

impl Drop for OpenClDevice {
    fn drop(&mut self) {
        if *self.has_failed.get_mut() {
            return;
        }
        // SAFETY: neither is used after this; both are dropped here alone.
        unsafe {
            ManuallyDrop::drop(&mut self.program);
            ManuallyDrop::drop(&mut self.context);
        }
    }
}

/// A queue of one.
pub(crate) struct OpenClQueue<'d> {
    device: &'d OpenClDevice,
    objects: ManuallyDrop<QueueObjects>,
}

/// What the driver made for it.
struct QueueObjects {
    queue: CommandQueue,
    kernels: Vec<OpenClKernel>,
    memory: Vec<Buffer<u8>>,
    pinned: Vec<Mapped>,
    /// What is under way. A command that failed is told by its event alone.
    events: Vec<Event>,
}

/// Memory that is mapped here at that address.
struct Mapped {
    buffer: Buffer<u8>,
    start: *mut c_void,
}

// SAFETY: OpenCL's objects and mapped memory may be used by any thread (OpenCL 1.2, appendix A.2); kernels, whose
// arguments may not, by the one that has the queue.
unsafe impl Send for OpenClQueue<'_> {}

impl OpenClQueue<'_> {
    fn buffer(&self, flags: u64, bytes: usize) -> Result<Buffer<u8>, GpuError> {
        // SAFETY: without CL_MEM_USE_HOST_PTR no pointer of ours is kept.
        unsafe { Buffer::create(&self.device.context, flags, bytes, null_mut()) }
            .map_err(self.device.failed("make room"))
    }
}

impl Queue for OpenClQueue<'_> {
    fn allocate(&mut self, bytes: usize) -> Result<DeviceMemory, GpuError> {
        let room = self.buffer(CL_MEM_READ_WRITE, bytes)?;
        self.objects.memory.push(room);
        Ok(DeviceMemory(self.objects.memory.len() - 1))
    }

    fn pin(&mut self, bytes: usize) -> Result<Pinned, GpuError> {
        let buffer = self.buffer(CL_MEM_ALLOC_HOST_PTR | CL_MEM_READ_WRITE, bytes)?;
        let (mut start, how) = (null_mut(), CL_MAP_READ | CL_MAP_WRITE);
        let queue = &self.objects.queue;
        // SAFETY: the whole buffer is mapped, once, and nothing of it is in use yet; the call waits.
        let mapped = unsafe {
            queue.enqueue_map_buffer(&buffer, CL_BLOCKING, how, 0, bytes, &mut start, &[])
        };
        if let Err(cause) = mapped {
            std::mem::forget(buffer);
            return Err(self.device.failed("map pinned memory")(cause));
        }
        self.objects.pinned.push(Mapped { buffer, start });
        // SAFETY: it is mapped until the queue is dropped, no kernel is given it, and it holds some bytes.
        Ok(unsafe { Pinned::new(start.cast(), bytes) })
    }

    // SAFETY: the caller's.
    unsafe fn copy_there(
        &mut self,
        to: DeviceMemory,
        from: &Pinned,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let QueueObjects { queue, memory, .. } = &mut *self.objects;
        let (to, from) = (&mut memory[to.0], &from.slice()[..bytes]);
        // SAFETY: by the caller.
        let copy = unsafe { queue.enqueue_write_buffer(to, CL_NON_BLOCKING, 0, from, &[]) };
        self.objects.events.push(copy.map_err(self.device.failed("copy to the device"))?);
        Ok(())
    }

    // SAFETY: the caller's.
    unsafe fn copy_back(
        &mut self,
        from: DeviceMemory,
        to: &mut Pinned,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let (from, to) = (&self.objects.memory[from.0], &mut to.slice_mut()[..bytes]);
        // SAFETY: by the caller.
        let copy =
            unsafe { self.objects.queue.enqueue_read_buffer(from, CL_NON_BLOCKING, 0, to, &[]) };
        self.objects.events.push(copy.map_err(self.device.failed("copy from the device"))?);
        Ok(())
    }

    // SAFETY: the caller's.
    unsafe fn run(
        &mut self,
        kernel: Kernel,
        arguments: &[Argument],
        groups: usize,
        items: usize,
    ) -> Result<(), GpuError> {
        let kernel = &self.objects.kernels[kernel as usize];
        for (place, argument) in (0..).zip(arguments) {
            // SAFETY: by the caller; the driver copies the value.
            let set = unsafe {
                match argument {
                    Argument::Memory(memory) => {
                        kernel.set_arg(place, &self.objects.memory[memory.0].get())
                    }
                    Argument::Number(number) => kernel.set_arg(place, number),
                }
            };
            set.map_err(self.device.failed("give a kernel its arguments"))?;
        }
        let (all, together) = ([groups * items], [items]);
        // SAFETY: by the caller; one dimension is read of each.
        let run = unsafe {
            let (kernel, offset) = (kernel.get(), std::ptr::null());
            let (all, together) = (all.as_ptr(), together.as_ptr());
            self.objects.queue.enqueue_nd_range_kernel(kernel, 1, offset, all, together, &[])
        };
        self.objects.events.push(run.map_err(self.device.failed("run a kernel"))?);
        Ok(())
    }

    fn start(&mut self) -> Result<(), GpuError> {
        self.objects.queue.flush().map_err(self.device.failed("start a batch"))
    }

    fn wait(&mut self) -> Result<(), GpuError> {
        let QueueObjects { queue, events, .. } = &mut *self.objects;
        queue.finish().map_err(self.device.failed("wait for the device"))?;
        let ended = events.iter().try_for_each(|event| event.wait());
        ended.map_err(self.device.failed("encode a batch"))?;
        events.clear();
        Ok(())
    }
}

impl Drop for OpenClQueue<'_> {
    fn drop(&mut self) {
        let QueueObjects { queue, pinned, .. } = &mut *self.objects;
        for Mapped { buffer, start } in pinned {
            // SAFETY: it was mapped there, and nobody uses it after this.
            let unmapped = unsafe { queue.enqueue_unmap_mem_object(buffer.get(), *start, &[]) };
            let _ = unmapped.map_err(self.device.failed("unmap pinned memory"));
        }
        let _ = queue.finish().map_err(self.device.failed("end a queue"));
        let _turn = one_at_a_time();
        if !self.device.has_failed.load(Ordering::Relaxed) {
            // SAFETY: they are not used after this, and dropped here alone.
            unsafe { ManuallyDrop::drop(&mut self.objects) }
        }
    }
}
