//! What can go wrong with a guest's folder.

use std::io;
use std::path::{Path, PathBuf};

/// A problem with a guest's folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// There is no such guest.
    #[error("there is no guest '{0}'")]
    NoSuchGuest(String),
    /// The name is taken.
    #[error("there is a guest '{0}' already")]
    Exists(String),
    /// The name cannot be a file's.
    #[error("'{0}' is no name for a guest: use letters, digits, '-', '_' and '.', at most 40")]
    BadName(String),
    /// Another command works on the guest.
    #[error("another dewar command is working on guest '{0}'")]
    Locked(String),
    /// Another command does the same.
    #[error("another dewar command is at work on {0}")]
    Busy(String),
    /// A file could not be read or written.
    #[error("cannot {operation} {}: {cause}", path.display())]
    Io {
        /// What was being done.
        operation: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system answered.
        cause: io::Error,
    },
}

/// The error of an operation on a file, from what the system answered.
pub fn io_error<'a>(
    operation: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> RegistryError + use<'a> {
    move |cause| RegistryError::Io { operation, path: path.to_owned(), cause }
}
