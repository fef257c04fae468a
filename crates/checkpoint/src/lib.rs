//! Live checkpoint and restore.
//!
//! [`checkpoint`] captures a guest while it runs, in the five stages that its
//! module describes; [`restore`] holds the two ways back: all pages first
//! ([`restore::fill_files`]), or the guest first ([`restore::PageServer`]).
#![forbid(unsafe_code)]

mod allowance;
mod behind;
mod buffer;
mod bulk;
mod capture;
mod capture_context;
mod captures;
mod compare;
mod error;
mod frames;
mod observe;
mod overflow;
mod page_sender;
mod processes;
pub mod restore;
mod spread;

pub use capture::{Base, CheckpointOptions, CheckpointOutcome, DirtyStoreOptions, checkpoint};
pub use dewar_capture::{CaptureStep, cores};
pub use error::CheckpointError;
pub use observe::{Observer, Step};
pub use processes::{ProcessCheckpoint, checkpoint_processes};
