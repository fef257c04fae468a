//! Devices of NVIDIA's driver, by its own interface: for machines that have it without its OpenCL part.
//!
//! The context is the *primary* one of the device, which all that use it in this process share. A thread
//! names it before each call. Waiting for the device sleeps: by default the driver would spin, and take
//! the core that the device is to relieve.

use crate::GpuError;
use crate::cuda_driver::{
    BLOCKING_SYNC, Context, Device, Driver, Function, Module, NON_BLOCKING, Stream,
};
use crate::kernel::{Kernel, PTX};
use crate::queue::{Argument, DeviceMemory, Pinned, Queue};
use std::ffi::{CStr, CString, c_void};
use std::ptr::null_mut;

/// Most bytes of a device's name.
const NAME_BYTES: usize = 256;

/// A device with the kernels in it.
pub(crate) struct CudaDevice {
    pub(crate) name: String,
    driver: Driver,
    device: Device,
    context: Context,
    module: Module,
    functions: [Function; Kernel::ALL.len()],
}

// SAFETY: the driver's handles may be used by any thread that has named the context, as each does before a call.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; the driver locks what calls of several threads change.
unsafe impl Sync for CudaDevice {}

impl CudaDevice {
    /// The first device; none where there is no driver, or it has none.
    pub(crate) fn first() -> Result<Option<Self>, GpuError> {
        let Some(driver) = Driver::load()? else { return Ok(None) };
        let (mut count, mut device) = (0, 0);
        // SAFETY: the driver has begun, and writes a number to each.
        unsafe {
            driver.check("count devices", driver.api.device_get_count(&mut count))?;
            if count == 0 {
                return Ok(None);
            }
            driver.check("find a device", driver.api.device_get(&mut device, 0))?;
        }
        Self::open(driver, device).map(Some)
    }

    fn open(driver: Driver, device: Device) -> Result<Self, GpuError> {
        let mut name = [0_u8; NAME_BYTES];
        let mut context = null_mut();
        // SAFETY: it is one of the driver's devices; the name has as much room as is said, and what it retains is
        // released where this value is dropped.
        unsafe {
            let length = NAME_BYTES as i32;
            let named = driver.api.device_get_name(name.as_mut_ptr().cast(), length, device);
            driver.check("name a device", named)?;
            // Where somebody uses the context already, it waits as that one said.
            let _ = driver.api.set_context_flags(device, BLOCKING_SYNC);
            let retained = driver.api.retain_context(&mut context, device);
            driver.check("use a device", retained)?;
        }
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        let mut opened = Self {
            name: name.to_string_lossy().trim().to_owned(),
            driver,
            device,
            context,
            module: null_mut(),
            functions: [null_mut(); Kernel::ALL.len()],
        };
        opened.load_kernels()?;
        Ok(opened)
    }

    fn load_kernels(&mut self) -> Result<(), GpuError> {
        self.enter()?;
        let api = self.driver.api;
        // SAFETY: the text ends with a zero; the driver copies it.
        let loaded = unsafe { api.module_load_data(&mut self.module, PTX.as_ptr().cast()) };
        self.driver.check("load the kernels", loaded).map_err(|error| GpuError::Kernels {
            device: self.name.clone(),
            log: error.to_string(),
        })?;
        for kernel in Kernel::ALL {
            let name = CString::new(kernel.name()).unwrap_or_default();
            let function = &mut self.functions[kernel as usize];
            // SAFETY: the module is loaded, and the name ends with a zero.
            let found = unsafe { api.module_get_function(function, self.module, name.as_ptr()) };
            self.driver.check("find a kernel", found)?;
        }
        Ok(())
    }

    /// Names the context for this thread.
    fn enter(&self) -> Result<(), GpuError> {
        // SAFETY: it is retained as long as this value lives.
        self.driver.check("use a device", unsafe { self.driver.api.set_context(self.context) })
    }

    pub(crate) fn queue(&self) -> Result<CudaQueue<'_>, GpuError> {
        self.enter()?;
        let mut stream = null_mut();
        // SAFETY: it writes a handle, which the queue destroys.
        let made = unsafe { self.driver.api.stream_create(&mut stream, NON_BLOCKING) };
        self.driver.check("make a queue", made)?;
        Ok(CudaQueue { device: self, stream, memory: Vec::new(), pinned: Vec::new() })
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let _ = self.enter();
        // SAFETY: no queue is left, which borrow this value; both are given up once.
        unsafe {
            if !self.module.is_null() {
                let _ = self.driver.api.module_unload(self.module);
            }
            let _ = self.driver.api.release_context(self.device);
        }
    }
}

/// A queue of one.
pub(crate) struct CudaQueue<'d> {
    device: &'d CudaDevice,
    stream: Stream,
    /// Addresses on the device.
    memory: Vec<u64>,
    pinned: Vec<*mut c_void>,
}

// SAFETY: as for the device.
unsafe impl Send for CudaQueue<'_> {}

impl CudaQueue<'_> {
    fn check(&self, operation: &'static str, result: i32) -> Result<(), GpuError> {
        self.device.driver.check(operation, result)
    }
}

impl Queue for CudaQueue<'_> {
    fn allocate(&mut self, bytes: usize) -> Result<DeviceMemory, GpuError> {
        self.device.enter()?;
        let mut address = 0;
        // SAFETY: it writes an address, which is freed where the queue is dropped.
        let result = unsafe { self.device.driver.api.allocate(&mut address, bytes) };
        self.check("make room on the device", result)?;
        self.memory.push(address);
        Ok(DeviceMemory(self.memory.len() - 1))
    }

    fn pin(&mut self, bytes: usize) -> Result<Pinned, GpuError> {
        self.device.enter()?;
        let mut start = null_mut();
        // SAFETY: it writes an address, which is freed where the queue is dropped.
        let result = unsafe { self.device.driver.api.allocate_pinned(&mut start, bytes, 0) };
        self.check("pin memory", result)?;
        self.pinned.push(start);
        // SAFETY: so many bytes are there, of nobody else; now they have a value, and stay until the queue is dropped.
        unsafe {
            start.cast::<u8>().write_bytes(0, bytes);
            Ok(Pinned::new(start.cast(), bytes))
        }
    }

    // SAFETY: the caller's.
    unsafe fn copy_there(
        &mut self,
        to: DeviceMemory,
        from: &Pinned,
        bytes: usize,
    ) -> Result<(), GpuError> {
        self.device.enter()?;
        let (to, from) = (self.memory[to.0], from.slice()[..bytes].as_ptr().cast());
        let api = self.device.driver.api;
        // SAFETY: by the caller.
        let result = unsafe { api.copy_to_device(to, from, bytes, self.stream) };
        self.check("copy to the device", result)
    }

    // SAFETY: the caller's.
    unsafe fn copy_back(
        &mut self,
        from: DeviceMemory,
        to: &mut Pinned,
        bytes: usize,
    ) -> Result<(), GpuError> {
        self.device.enter()?;
        let (from, to) = (self.memory[from.0], to.slice_mut()[..bytes].as_mut_ptr().cast());
        let api = self.device.driver.api;
        // SAFETY: by the caller.
        let result = unsafe { api.copy_from_device(to, from, bytes, self.stream) };
        self.check("copy from the device", result)
    }

    // SAFETY: the caller's.
    unsafe fn run(
        &mut self,
        kernel: Kernel,
        arguments: &[Argument],
        groups: usize,
        items: usize,
    ) -> Result<(), GpuError> {
        self.device.enter()?;
        // Each is read through a pointer to as many bytes as the kernel's argument has; numbers are little-endian.
        let mut values: Vec<u64> = arguments
            .iter()
            .map(|argument| match argument {
                Argument::Memory(memory) => self.memory[memory.0],
                Argument::Number(number) => u64::from(*number),
            })
            .collect();
        let mut pointers: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        let (function, api) = (self.device.functions[kernel as usize], self.device.driver.api);
        let (groups, items) = (groups as u32, items as u32);
        // SAFETY: by the caller; the driver copies the values before it comes back.
        let result = unsafe {
            let arguments = pointers.as_mut_ptr();
            let (stream, none) = (self.stream, null_mut());
            api.launch_kernel(function, groups, 1, 1, items, 1, 1, 0, stream, arguments, none)
        };
        self.check("run a kernel", result)
    }

    fn start(&mut self) -> Result<(), GpuError> {
        Ok(())
    }

    fn wait(&mut self) -> Result<(), GpuError> {
        self.device.enter()?;
        // SAFETY: the stream lives.
        let result = unsafe { self.device.driver.api.stream_synchronize(self.stream) };
        self.check("encode a batch", result)
    }
}

impl Drop for CudaQueue<'_> {
    fn drop(&mut self) {
        let _ = self.wait();
        let api = self.device.driver.api;
        // SAFETY: nothing is under way, and each is freed once.
        unsafe {
            for start in &self.pinned {
                let _ = api.free_pinned(*start);
            }
            for address in &self.memory {
                let _ = api.free(*address);
            }
            let _ = api.stream_destroy(self.stream);
        }
    }
}
