use std::path::PathBuf;

/// Why a host cannot be given another kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostRebootError {
    /// A file that is needed.
    #[error("{operation} {}: {cause}", path.display())]
    File {
        /// What was done with it.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system answered.
        #[source]
        cause: std::io::Error,
    },
    /// A file that is no kernel.
    #[error("{} is no Linux kernel for this machine: {why}", path.display())]
    NoKernel {
        /// The file.
        path: PathBuf,
        /// What it lacks.
        why: &'static str,
    },
    /// The running kernel does not start another.
    #[error("this kernel starts no other: {0}")]
    NotAllowed(String),
    /// The kernel refuses a call.
    #[error(transparent)]
    Kernel(#[from] dewar_kernel::KernelError),
}

impl HostRebootError {
    /// Says what was done with a file when it failed.
    pub(crate) fn file(
        operation: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |cause| Self::File { operation, path, cause }
    }
}
