//! The memory plane: a guest's RAM as Dewar sees it.
//!
//! RAM is one or more shared files that the guest's process and Dewar both
//! map. [`Ram`] reads pages through Dewar's own mapping; [`WriteTracker`]
//! knows which pages the guest wrote; [`FaultServer`] supplies pages that are
//! not there yet. Nothing runs inside the guest's process.
#![forbid(unsafe_code)]

mod ram;
mod serve;
mod sums;
mod track;

pub use dewar_kernel::{KernelError, Pid, ProcessHandle, UffdOrigin, available_memory};
pub use ram::{NewRam, Ram, RamRegion};
pub use serve::{FaultServer, Faults};
pub use sums::{SUM_BYTES, sum, sums};
pub use track::{DirtyLease, WriteTracker};
