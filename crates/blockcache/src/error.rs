//! Why a disk cannot be served.

use dewar_kernel::KernelError;
use std::io;
use std::path::PathBuf;

/// Why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// The system refused something.
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
    /// Another program has the file in use.
    #[error("{} is in use by another program: two would destroy it", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// Its locks cannot be taken.
    #[error("cannot lock {}: {cause}", path.display())]
    Lock {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        cause: KernelError,
    },
    /// It is no multiple of a sector.
    #[error("{} is {bytes} bytes long, which is no multiple of 512", path.display())]
    Odd {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
}

impl BlockError {
    pub(crate) fn file(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::File { operation, path, cause }
    }
}
