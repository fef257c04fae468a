//! Why a guest's memory was not set aside at its reset.

use crate::qmp::QmpError;
use dewar_kernel::KernelError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a guest's memory was not set aside, or it could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// QEMU refused, or is gone.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A file could not be made or moved.
    #[error("cannot {operation} {}: {cause}", path.display())]
    File {
        /// What was being done.
        operation: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system answered.
        #[source]
        cause: io::Error,
    },
    /// QEMU has the memory otherwise than this can handle.
    #[error("QEMU has {} mapped in a way that cannot be exchanged", path.display())]
    Mapped {
        /// The RAM file.
        path: PathBuf,
    },
}

pub(super) fn file(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ResetError {
    let path = path.to_owned();
    move |cause| ResetError::File { operation, path, cause }
}
