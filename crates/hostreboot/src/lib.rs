//! Another kernel under a host while the memory of its guests stays in RAM.
//!
//! kexec(8) starts a kernel from a kernel: no firmware runs, and nothing clears RAM. What the new kernel does not
//! take for its own is as it was. So memory is kept that the new kernel is told to leave alone:
//!
//! - [`dax`]: RAM that a `memmap=` of the kernel's command line sets aside as persistent memory, with a file system
//!   on it whose files *are* that memory (DAX). The same `memmap=` on the new kernel's command line keeps it.
//! - [`live_update`]: files in RAM that the kernel itself hands over to the next (Linux 6.19).
//!
//! [`command_line`] reads command lines of kernels, [`kernel_image`] says what a kernel is, and [`kexec`] loads it.
//! Nothing here knows what a guest is.
#![forbid(unsafe_code)]

pub mod command_line;
pub mod dax;
mod error;
pub mod kernel_image;
pub mod kexec;
pub mod live_update;

pub use command_line::{CommandLine, Reservation};
pub use dax::DaxMount;
pub use error::HostRebootError;
pub use kernel_image::KernelImage;
