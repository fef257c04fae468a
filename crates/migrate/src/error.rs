use dewar_codec::CodecError;
use dewar_memory::KernelError;
use dewar_wire::frame::FrameError;
use dewar_wire::pages::PagesError;
use std::io;

/// Why memory did not get to the other host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// A connection failed.
    #[error("{operation} connection {shard}: {cause}")]
    Link {
        /// What was being done.
        operation: &'static str,
        /// Which connection of the migration.
        shard: u16,
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// A connection ended before everything had arrived.
    #[error("connection {0} ended in the middle of the migration")]
    Ended(u16),
    /// What arrived is not what was due.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// What arrived is no pages.
    #[error(transparent)]
    Pages(#[from] PagesError),
    /// A frame of a kind that has no place here.
    #[error("a frame that carries no pages arrived on connection {0}")]
    Unexpected(u16),
    /// Epochs ended in another order than they began.
    #[error("epoch {found} ended on connection {shard}, where epoch {wanted} was under way")]
    Epoch {
        /// Which connection.
        shard: u16,
        /// Which epoch it says.
        found: u32,
        /// Which it should be.
        wanted: u32,
    },
    /// Pages cannot be encoded or expanded.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// Memory cannot be read or written.
    #[error("memory: {0}")]
    Memory(#[from] KernelError),
}
