use opencl3::error_codes::ClError;

/// Why a GPU does not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// OpenCL refuses something.
    #[error("OpenCL cannot {operation}: {cause}")]
    OpenCl {
        /// What was being done.
        operation: &'static str,
        /// What it answered.
        cause: ClError,
    },
    /// NVIDIA's driver refuses something.
    #[error("NVIDIA's driver cannot {operation}: {cause} (CUDA error {number})")]
    Cuda {
        /// What was being done.
        operation: &'static str,
        /// What it answered, in its words.
        cause: String,
        /// And by number (`CUresult`).
        number: i32,
    },
    /// The driver does not compile the kernels.
    #[error("the driver of {device} does not compile the page codecs: {log}")]
    Kernels {
        /// Of which device.
        device: String,
        /// What its compiler says.
        log: String,
    },
    /// It puts the bytes of numbers in another order than the formats do.
    #[error("{0} is a big-endian device, which is not supported")]
    BigEndian(String),
    /// What it says of a batch cannot be.
    #[error("{0} gave sizes of pages that cannot be")]
    Nonsense(String),
}
