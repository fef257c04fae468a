use dewar_store::StoreError;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// What can go wrong with an image or its store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The store or a file system refused, or did not answer.
    #[error(transparent)]
    Store(StoreError),
    /// There is no store.
    #[error("there is no checkpoint store in {url}")]
    NoStore {
        /// Where.
        url: String,
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
        match self {
            Self::Store(error) => error.is_for_want_of_room(),
            Self::Earlier(error) => error.is_for_want_of_room(),
            _ => false,
        }
    }

    /// Whether a server that keeps the store refused, or did not answer: then the next request
    /// would fail, too.
    pub fn is_server_failure(&self) -> bool {
        matches!(self, Self::Store(StoreError::Server { .. }))
    }

    pub(crate) fn io<'a>(
        operation: &'static str,
        path: &'a Path,
    ) -> impl FnOnce(io::Error) -> Self + use<'a> {
        move |cause| Self::Store(StoreError::io(operation, path)(cause))
    }

    pub(crate) fn damaged(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Damaged { place: place.into(), problem: problem.into() }
    }
}

impl From<StoreError> for ImageError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Damaged { place, problem } => Self::Damaged { place, problem },
            other => Self::Store(other),
        }
    }
}
