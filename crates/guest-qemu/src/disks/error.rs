//! What can go wrong with a disk.

use crate::qmp::QmpError;
use dewar_registry::RegistryError;
use std::path::PathBuf;

/// What can go wrong with a disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The journal.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A file.
    #[error("{0}: {1}")]
    File(String, std::io::Error),
    /// `qemu-img`.
    #[error("qemu-img {0}")]
    Tool(String),
    /// An overlay is not newer than its disk any more.
    #[error(
        "{} was written by others since a checkpoint was cut short; what its guest had written then \
         is in {}, and cannot be put into it any more", own.display(), overlay.display()
    )]
    Outdated {
        /// The disk's own file.
        own: PathBuf,
        /// The overlay's file.
        overlay: PathBuf,
    },
    /// A job in QEMU.
    #[error("QEMU's job '{0}' failed: {1}")]
    Job(String, String),
}
