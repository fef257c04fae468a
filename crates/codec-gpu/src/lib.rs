//! Page codecs on a GPU, by NVIDIA's driver or by OpenCL.
//!
//! Both are loaded when a GPU is first looked for: where a machine has none, nothing is loaded, and
//! [`Gpu::find`] finds none. Pages are encoded in batches of thousands: those of one batch are copied to the GPU,
//! encoded there, and come back as the few bytes that they take. Several batches are under way at once, each
//! with memory of its own, so that the copies of one go on beside the work on another.
//!
//! What a reader gets is what the CPU codecs make: words that differ
//! (`dewar_codec::encode_words`, byte for byte), XXH3 of 64 bits, and LZ4 blocks of one page each
//! that any LZ4 reader takes. A guest's RAM is never registered with the driver, which would lock its pages: pages
//! are copied into memory of the driver's own.

mod batch;
mod cuda;
mod cuda_driver;
mod error;
mod gpu;
mod kernel;
mod opencl;
mod queue;

pub use batch::{Batch, Encoded, Encoding};
pub use error::GpuError;
pub use gpu::{Devices, Gpu};
