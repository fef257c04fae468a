use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong with a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The file system refused.
    #[error("cannot {operation} {}: {cause}", path.display())]
    Io {
        /// What was being done.
        operation: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system answered.
        #[source]
        cause: io::Error,
    },
    /// A server refused, or did not answer.
    #[error("cannot {operation} {object} in {store}: {cause}")]
    Server {
        /// What was being done.
        operation: &'static str,
        /// To what.
        object: String,
        /// In which store.
        store: String,
        /// Whether it refused because its memory is full.
        is_full: bool,
        /// What it answered.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
    /// A store's name is not understood.
    #[error("store '{url}': {problem}")]
    BadUrl {
        /// The name, without credentials.
        url: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A store that may lose what it is given.
    #[error("{store} is no place for checkpoints: {problem}")]
    Unfit {
        /// Which.
        store: String,
        /// Why.
        problem: String,
    },
    /// An object is not what was written.
    #[error("{place} is damaged: {problem}")]
    Damaged {
        /// Which object, where.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl StoreError {
    /// Whether it failed because nothing more can be written there: the file system or the
    /// server is full, or what its owner may have of it is used up.
    pub fn is_for_want_of_room(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::Io { cause, .. } => matches!(cause.kind(), StorageFull | QuotaExceeded),
            Self::Server { is_full, .. } => *is_full,
            _ => false,
        }
    }

    /// The error of an operation on a file.
    pub fn io<'a>(
        operation: &'static str,
        path: &'a Path,
    ) -> impl FnOnce(io::Error) -> Self + use<'a> {
        move |cause| Self::Io { operation, path: path.to_owned(), cause }
    }
}
