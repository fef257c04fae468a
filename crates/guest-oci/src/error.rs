use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong with a container.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OciError {
    /// The runtime could not be started.
    #[error("cannot run {}: {cause}", program.display())]
    NoRuntime {
        /// Its program.
        program: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The runtime knows no such container.
    #[error("{} knows no container '{id}'", program.display())]
    NoSuchContainer {
        /// Its program.
        program: PathBuf,
        /// The container.
        id: String,
    },
    /// The container is not running.
    #[error("container '{id}' is {status}, not running")]
    NotRunning {
        /// The container.
        id: String,
        /// How it is.
        status: String,
    },
    /// The runtime did not do what it was told.
    #[error("{operation} container '{id}' failed: {cause}")]
    Runtime {
        /// What it was told to do, as a verb with -ing.
        operation: &'static str,
        /// The container.
        id: String,
        /// What it said.
        cause: String,
    },
    /// CRIU did not save or restore it.
    #[error("CRIU cannot take container '{id}': {cause}")]
    Criu {
        /// The container.
        id: String,
        /// Which part of it, and why.
        cause: String,
        /// What can be done.
        advice: Option<&'static str>,
    },
    /// The network of a container could not be closed, or opened.
    #[error("the container's network cannot be closed or opened: {cause}")]
    Network {
        /// What the program said that does it.
        cause: String,
    },
    /// Nothing was touched: this container, or this host, lacks what is needed.
    #[error("container '{id}' cannot be handled: {}", reasons.join("; "))]
    Unsupported {
        /// The container.
        id: String,
        /// Each thing that is missing, and what to do.
        reasons: Vec<String>,
    },
    /// It ran while it was to stand still: somebody else let it go on, or CRIU did not freeze a process of it.
    #[error("container '{id}' ran, or a process of it, while its memory was read")]
    RanOn {
        /// The container.
        id: String,
    },
    /// Its memory came to be larger than was expected.
    #[error("the container's memory has grown to more than {} MiB meanwhile", room >> 20)]
    Grew {
        /// The bytes that were expected, at most.
        room: u64,
    },
    /// An image file of CRIU is not as it should be.
    #[error("CRIU's image {}: {problem}", path.display())]
    Image {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
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

impl OciError {
    /// The error of an operation on a file, from what the system answered.
    pub(crate) fn io<'p>(
        operation: &'static str,
        path: &'p Path,
    ) -> impl FnOnce(io::Error) -> Self + use<'p> {
        move |cause| Self::Io { operation, path: path.to_owned(), cause }
    }

    /// Whether a runtime, or podman, refused an id because there is a container that has it.
    pub(crate) fn is_of_taken_id(&self) -> bool {
        let is_refusal = |cause: &str| {
            ["already exists", "already in use"].iter().any(|words| cause.contains(words))
        };
        matches!(self, Self::Runtime { cause, .. } if is_refusal(cause))
    }

    /// What can be done about it, where that is known.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Criu { advice, .. } => *advice,
            _ => None,
        }
    }
}
