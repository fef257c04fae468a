//! `libcuda.so.1`, the interface of NVIDIA's driver (CUDA Driver API), loaded at run time.
// A kernel is launched with as many arguments as the library wants.
#![allow(clippy::too_many_arguments)]

use crate::GpuError;
use dlopen2::wrapper::{Container, WrapperApi};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `CUdevice`.
pub(crate) type Device = c_int;
/// `CUcontext`.
pub(crate) type Context = *mut c_void;
/// `CUmodule`.
pub(crate) type Module = *mut c_void;
/// `CUfunction`.
pub(crate) type Function = *mut c_void;
/// `CUstream`.
pub(crate) type Stream = *mut c_void;

/// `CU_CTX_SCHED_BLOCKING_SYNC`: a thread that waits for the device sleeps.
pub(crate) const BLOCKING_SYNC: c_uint = 4;
/// `CU_STREAM_NON_BLOCKING`: it does not wait for what others of the process give to the device.
pub(crate) const NON_BLOCKING: c_uint = 1;

const SUCCESS: c_int = 0;
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: c_int = 100;
/// `CUDA_ERROR_SYSTEM_NOT_READY` and `CUDA_ERROR_STUB_LIBRARY`: libcuda.so.1 is there, its driver is not.
const NO_DRIVER: [c_int; 2] = [802, 34];
const LIBRARY: &str = "libcuda.so.1";

/// What is used of it.
#[derive(WrapperApi)]
pub(crate) struct Api {
    #[dlopen2_name = "cuInit"]
    init: unsafe extern "C" fn(flags: c_uint) -> c_int,
    #[dlopen2_name = "cuGetErrorString"]
    get_error_string: unsafe extern "C" fn(error: c_int, text: *mut *const c_char) -> c_int,
    #[dlopen2_name = "cuDeviceGetCount"]
    device_get_count: unsafe extern "C" fn(count: *mut c_int) -> c_int,
    #[dlopen2_name = "cuDeviceGet"]
    device_get: unsafe extern "C" fn(device: *mut Device, ordinal: c_int) -> c_int,
    #[dlopen2_name = "cuDeviceGetName"]
    device_get_name:
        unsafe extern "C" fn(name: *mut c_char, length: c_int, device: Device) -> c_int,
    #[dlopen2_name = "cuDevicePrimaryCtxSetFlags_v2"]
    set_context_flags: unsafe extern "C" fn(device: Device, flags: c_uint) -> c_int,
    #[dlopen2_name = "cuDevicePrimaryCtxRetain"]
    retain_context: unsafe extern "C" fn(context: *mut Context, device: Device) -> c_int,
    #[dlopen2_name = "cuDevicePrimaryCtxRelease_v2"]
    release_context: unsafe extern "C" fn(device: Device) -> c_int,
    #[dlopen2_name = "cuCtxSetCurrent"]
    set_context: unsafe extern "C" fn(context: Context) -> c_int,
    #[dlopen2_name = "cuModuleLoadData"]
    module_load_data: unsafe extern "C" fn(module: *mut Module, image: *const c_void) -> c_int,
    #[dlopen2_name = "cuModuleUnload"]
    module_unload: unsafe extern "C" fn(module: Module) -> c_int,
    #[dlopen2_name = "cuModuleGetFunction"]
    module_get_function:
        unsafe extern "C" fn(function: *mut Function, module: Module, name: *const c_char) -> c_int,
    #[dlopen2_name = "cuStreamCreate"]
    stream_create: unsafe extern "C" fn(stream: *mut Stream, flags: c_uint) -> c_int,
    #[dlopen2_name = "cuStreamSynchronize"]
    stream_synchronize: unsafe extern "C" fn(stream: Stream) -> c_int,
    #[dlopen2_name = "cuStreamDestroy_v2"]
    stream_destroy: unsafe extern "C" fn(stream: Stream) -> c_int,
    #[dlopen2_name = "cuMemAlloc_v2"]
    allocate: unsafe extern "C" fn(address: *mut u64, bytes: usize) -> c_int,
    #[dlopen2_name = "cuMemFree_v2"]
    free: unsafe extern "C" fn(address: u64) -> c_int,
    #[dlopen2_name = "cuMemHostAlloc"]
    allocate_pinned:
        unsafe extern "C" fn(start: *mut *mut c_void, bytes: usize, flags: c_uint) -> c_int,
    #[dlopen2_name = "cuMemFreeHost"]
    free_pinned: unsafe extern "C" fn(start: *mut c_void) -> c_int,
    #[dlopen2_name = "cuMemcpyHtoDAsync_v2"]
    copy_to_device:
        unsafe extern "C" fn(to: u64, from: *const c_void, bytes: usize, stream: Stream) -> c_int,
    #[dlopen2_name = "cuMemcpyDtoHAsync_v2"]
    copy_from_device:
        unsafe extern "C" fn(to: *mut c_void, from: u64, bytes: usize, stream: Stream) -> c_int,
    #[dlopen2_name = "cuLaunchKernel"]
    launch_kernel: unsafe extern "C" fn(
        function: Function,
        groups_x: c_uint,
        groups_y: c_uint,
        groups_z: c_uint,
        items_x: c_uint,
        items_y: c_uint,
        items_z: c_uint,
        shared_bytes: c_uint,
        stream: Stream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int,
}

/// The loaded driver.
pub(crate) struct Driver {
    pub(crate) api: &'static Container<Api>,
}

impl Driver {
    /// Loads it and begins; none where this machine has no driver or no device.
    pub(crate) fn load() -> Result<Option<Self>, GpuError> {
        // It stays for good: threads of its own may run in it.
        static LOADED: OnceLock<Option<Container<Api>>> = OnceLock::new();
        // SAFETY: what the library does when it is loaded is its maker's; the functions are declared as in its
        // header, cuda.h.
        let loaded = LOADED.get_or_init(|| unsafe { Container::load(LIBRARY) }.ok());
        let Some(api) = loaded else { return Ok(None) };
        let driver = Self { api };
        // SAFETY: it may be called again and again.
        match unsafe { driver.api.init(0) } {
            error if error == NO_DEVICE || NO_DRIVER.contains(&error) => Ok(None),
            result => driver.check("begin", result).map(|()| Some(driver)),
        }
    }

    /// The error of a call, if it is one.
    pub(crate) fn check(&self, operation: &'static str, result: c_int) -> Result<(), GpuError> {
        if result == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: it writes a pointer to a text that stays, or none.
        let known = unsafe { self.api.get_error_string(result, &mut text) } == SUCCESS;
        let cause = match known && !text.is_null() {
            // SAFETY: as above; it ends with a zero.
            true => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            false => "an error without a name".to_owned(),
        };
        Err(GpuError::Cuda { operation, cause, number: result })
    }
}
