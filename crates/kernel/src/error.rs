use std::io;

/// A system call that failed: which, on what, and why.
#[derive(Debug, thiserror::Error)]
#[error("{operation} on {object}: {cause}")]
pub struct KernelError {
    /// The operation, by the name of its system call.
    pub operation: &'static str,
    /// What it was done to.
    pub object: String,
    /// What the kernel answered.
    #[source]
    pub cause: io::Error,
}

impl KernelError {
    /// What failed, on which object, and why.
    pub fn new(
        operation: &'static str,
        object: impl Into<String>,
        cause: impl Into<io::Error>,
    ) -> Self {
        Self { operation, object: object.into(), cause: cause.into() }
    }

    pub(crate) fn last(operation: &'static str, object: impl Into<String>) -> Self {
        Self::new(operation, object, io::Error::last_os_error())
    }

    /// The error number, where the kernel gave one.
    pub fn errno(&self) -> Option<i32> {
        self.cause.raw_os_error()
    }
}
