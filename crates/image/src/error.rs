use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What is said of a server whose memory is full.
pub(crate) const FULL: &str = "it is full (its maxmemory is reached)";

/// What can go wrong with an image or its store.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
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
    /// A store that is not a folder refused, or did not answer.
    #[error("cannot {operation} {object} in {store}: {cause}")]
    Store {
        /// What was being done.
        operation: &'static str,
        /// To what.
        object: String,
        /// In which store.
        store: String,
        /// What it answered.
        cause: String,
    },
    /// There is no store.
    #[error("there is no checkpoint store in {url}")]
    NoStore {
        /// Where.
        url: String,
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
    /// What failed before.
    #[error(transparent)]
    Earlier(Arc<ImageError>),
    /// Bytes are not what was written.
    #[error("{place} is damaged: {problem}")]
    Damaged {
        /// Which file, frame, page or record.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The bytes of an image's record are not what was written: nothing is known of it.
    #[error("the record of checkpoint {id} is damaged: {problem}")]
    BrokenRecord {
        /// The image.
        id: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Something was written by a version that this one does not understand.
    #[error("{place} needs a newer Dewar: {problem}")]
    TooNew {
        /// Which file.
        place: String,
        /// Version or feature that is unknown.
        problem: String,
    },
    /// It is not known to be damaged, but this machine lacks the memory to read it.
    #[error("checkpoint {id} has {what}, too many for this machine's memory")]
    TooLarge {
        /// Its id.
        id: String,
        /// How much of what it has, by its record.
        what: String,
    },
    /// No image has this name.
    #[error("there is no checkpoint '{reference}' in {store}")]
    NotFound {
        /// What was asked for.
        reference: String,
        /// Where it was looked for.
        store: String,
    },
    /// Several images have this name.
    #[error("'{reference}' could be any of {}: use a full id", candidates.join(", "))]
    Ambiguous {
        /// What was asked for.
        reference: String,
        /// The ids that fit.
        candidates: Vec<String>,
    },
    /// A record that cannot be read may be what was asked for, or newer than what was found.
    #[error("'{reference}' may be a checkpoint that cannot be read: {problem}")]
    Unsure {
        /// What was asked for.
        reference: String,
        /// The image of that name that can be read.
        found: Option<String>,
        /// Of the record.
        problem: String,
    },
    /// The image is being read.
    #[error(
        "checkpoint {id} is being read: by a restore, a verify, or a checkpoint that may share its pages"
    )]
    InUse {
        /// Its id.
        id: String,
    },
    /// Two images that are not of one guest.
    #[error("checkpoints {a} and {b} have different amounts of RAM")]
    DifferentSizes {
        /// The first.
        a: String,
        /// The second.
        b: String,
    },
    /// A page was never put: the image would not be whole.
    #[error("page {page} was never captured; the checkpoint is given up")]
    Incomplete {
        /// The first such page.
        page: u64,
    },
    /// A codec's library failed.
    #[error(transparent)]
    Codec(#[from] dewar_codec::CodecError),
}

impl ImageError {
    /// Whether it failed because nothing more can be written there: the file system is full,
    /// or what its owner may have of it.
    pub fn is_for_want_of_room(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::Io { cause, .. } => matches!(cause.kind(), StorageFull | QuotaExceeded),
            Self::Store { cause, .. } => cause.starts_with(FULL),
            Self::Earlier(error) => error.is_for_want_of_room(),
            _ => false,
        }
    }

    pub(crate) fn io<'a>(
        operation: &'static str,
        path: &'a Path,
    ) -> impl FnOnce(io::Error) -> Self + use<'a> {
        move |cause| Self::Io { operation, path: path.to_owned(), cause }
    }

    pub(crate) fn damaged(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Damaged { place: place.into(), problem: problem.into() }
    }
}
