use std::io;
use std::path::PathBuf;

/// Why the page cache could not be looked at, or filled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageCacheError {
    /// The kernel's tracing does not work as it should.
    #[error("cannot {operation} the kernel's tracing of reads: {cause}")]
    Tracing {
        /// What was being done.
        operation: &'static str,
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// A file or folder cannot be used.
    #[error("cannot {operation} {}: {cause}", path.display())]
    File {
        /// What was being done.
        operation: &'static str,
        /// To which.
        path: PathBuf,
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// Bytes are no manifest.
    #[error("this is no manifest of hot pages: {0}")]
    Manifest(String),
}

impl PageCacheError {
    pub(crate) fn tracing(operation: &'static str) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Tracing { operation, cause }
    }

    pub(crate) fn file(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::File { operation, path, cause }
    }
}
