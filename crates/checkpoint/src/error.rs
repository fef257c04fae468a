use dewar_guest::GuestError;
use dewar_image::ImageError;
use dewar_memory::KernelError;

/// Why a checkpoint or a restore did not succeed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The guest.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The image or its store.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Tracking, reading or filling memory.
    #[error("memory: {0}")]
    Memory(#[from] KernelError),
}
