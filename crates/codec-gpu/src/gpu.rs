use crate::GpuError;
use crate::cuda::CudaDevice;
use crate::opencl::{self, OpenClDevice};
use crate::queue::Queue;
use opencl3::device::{CL_DEVICE_TYPE_ALL, CL_DEVICE_TYPE_GPU};

/// Which devices are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices {
    /// GPUs alone.
    Gpus,
    /// Others, too, where there is no GPU: a driver that computes on the CPU, for tests.
    Any,
}

/// A device that encodes pages.
pub struct Gpu {
    device: Interface,
}

/// It, by the interface of its driver.
enum Interface {
    Cuda(CudaDevice),
    OpenCl(OpenClDevice),
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("Gpu").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl Gpu {
    /// The first device of this machine, a GPU where there is one; `None` where it has none, or no driver.
    ///
    /// # Errors
    /// Where there is none that works, and a driver that fails.
    pub fn find(devices: Devices) -> Result<Option<Self>, GpuError> {
        let mut failed = None;
        for found in Self::each(devices) {
            match found {
                Ok(gpu) => return Ok(Some(gpu)),
                // Another driver may have one that works.
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(None), Err)
    }

    /// The first device of each driver of this machine, the best first: a GPU is there once for each interface that its driver
    /// has.
    pub fn each(devices: Devices) -> impl Iterator<Item = Result<Self, GpuError>> {
        let cuda = || CudaDevice::first().map(|it| it.map(Interface::Cuda)).transpose();
        let gpus = || opencl_devices(CL_DEVICE_TYPE_GPU);
        let others = move || match devices {
            Devices::Gpus => Vec::new(),
            Devices::Any => opencl_devices(CL_DEVICE_TYPE_ALL & !CL_DEVICE_TYPE_GPU),
        };
        // Each is asked when those before it are not enough.
        let each = std::iter::once_with(move || cuda().into_iter().collect())
            .chain(std::iter::once_with(gpus))
            .chain(std::iter::once_with(others));
        each.flat_map(|found: Vec<_>| found).map(|found| found.map(|device| Self { device }))
    }

    pub(crate) fn queue(&self) -> Result<Box<dyn Queue + '_>, GpuError> {
        Ok(match &self.device {
            Interface::Cuda(device) => Box::new(device.queue()?),
            Interface::OpenCl(device) => Box::new(device.queue()?),
        })
    }

    /// What its driver calls it.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.device {
            Interface::Cuda(device) => &device.name,
            Interface::OpenCl(device) => &device.name,
        }
    }

    /// The interface by which it is used.
    #[must_use]
    pub fn interface(&self) -> &'static str {
        match &self.device {
            Interface::Cuda(_) => "CUDA driver",
            Interface::OpenCl(_) => "OpenCL",
        }
    }
}

fn opencl_devices(kind: u64) -> Vec<Result<Interface, GpuError>> {
    opencl::devices(kind).into_iter().map(|found| found.map(Interface::OpenCl)).collect()
}
