use crate::GpuError;
use opencl3::context::Context;
use opencl3::device::{CL_DEVICE_TYPE_ALL, CL_DEVICE_TYPE_GPU, Device, get_all_devices};
use opencl3::program::Program;
use std::sync::{Mutex, PoisonError};

/// The source of what runs on a device.
const KERNELS: &str = include_str!("kernels.cl");

/// Which devices of OpenCL are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// GPUs alone.
    Gpus,
    /// Others, too: a driver that computes on the CPU, for tests.
    Any,
}

/// A device that encodes pages.
pub struct Gpu {
    name: String,
    pub(crate) context: Context,
    pub(crate) program: Program,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("Gpu").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Gpu {
    /// The first device of this machine; `None` where it has none, or no OpenCL.
    ///
    /// # Errors
    /// Where there is one that does not work.
    pub fn find(devices: Devices) -> Result<Option<Self>, GpuError> {
        let kind = match devices {
            Devices::Gpus => CL_DEVICE_TYPE_GPU,
            Devices::Any => CL_DEVICE_TYPE_ALL,
        };
        // Loaders of drivers have been seen to find none where two threads ask for the first time at once.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        // Without a library or a driver there is no list of devices.
        let Some(device) = get_all_devices(kind).ok().and_then(|found| found.first().copied())
        else {
            return Ok(None);
        };
        Self::open(&Device::new(device)).map(Some)
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
