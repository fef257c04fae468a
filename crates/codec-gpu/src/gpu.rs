use crate::GpuError;
use opencl3::context::Context;
use opencl3::device::{CL_DEVICE_TYPE_ALL, CL_DEVICE_TYPE_GPU, Device};
use opencl3::error_codes::{CL_PLATFORM_NOT_FOUND_KHR, ClError, DLOPEN_RUNTIME_LOAD_FAILED};
use opencl3::platform::get_platforms;
use opencl3::program::Program;
use std::sync::{Mutex, PoisonError};

/// The source of what runs on a device.
const KERNELS: &str = include_str!("kernels.cl");

/// Which devices of OpenCL are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// GPUs alone.
    Gpus,
    /// Others, too, where there is no GPU: a driver that computes on the CPU, for tests.
    Any,
}

/// A device that encodes pages.
pub struct Gpu {
    name: String,
    pub(crate) context: Context,
    pub(crate) program: Program,
}

impl Devices {
    fn kinds(self) -> &'static [u64] {
        match self {
            Self::Gpus => &[CL_DEVICE_TYPE_GPU],
            Self::Any => &[CL_DEVICE_TYPE_GPU, CL_DEVICE_TYPE_ALL],
        }
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("Gpu").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Gpu {
    /// The first device of this machine, a GPU where there is one; `None` where it has none, or no OpenCL.
    ///
    /// # Errors
    /// Where there is none that works, and a driver that fails.
    pub fn find(devices: Devices) -> Result<Option<Self>, GpuError> {
        // Loaders of drivers have been seen to find none where two threads ask for the first time at once.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let platforms = match get_platforms() {
            Ok(platforms) => platforms,
            Err(ClError(DLOPEN_RUNTIME_LOAD_FAILED | CL_PLATFORM_NOT_FOUND_KHR)) => {
                return Ok(None);
            }
            Err(cause) => return Err(GpuError::of("list drivers")(cause)),
        };
        let mut failed = None;
        for kind in devices.kinds() {
            for platform in &platforms {
                let found = platform.get_devices(*kind).map_err(GpuError::of("list devices"));
                let opened = found.and_then(|found| {
                    found.first().map(|device| Self::open(&Device::new(*device))).transpose()
                });
                match opened {
                    Ok(None) => {}
                    Ok(found) => return Ok(found),
                    // Another driver may have one that works.
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
        }
        failed.map_or(Ok(None), Err)
    }

    fn open(device: &Device) -> Result<Self, GpuError> {
        let name = device.name().map_err(GpuError::of("name a device"))?.trim().to_owned();
        if !device.endian_little().map_err(GpuError::of("describe a device"))? {
            return Err(GpuError::BigEndian(name));
        }
        let context = Context::from_device(device).map_err(GpuError::of("use a device"))?;
        let program = Program::create_and_build_from_source(&context, KERNELS, "-cl-std=CL1.2")
            .map_err(|log| GpuError::Kernels { device: name.clone(), log })?;
        Ok(Self { name, context, program })
    }

    /// What its driver calls it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}
