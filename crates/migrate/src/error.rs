use dewar_codec::CodecError;
use dewar_codec_gpu::GpuError;
use dewar_guest::GuestError;
use dewar_memory::KernelError;
use dewar_units::PageNumber;
use dewar_wire::control::CONTROL;
use dewar_wire::frame::FrameError;
use dewar_wire::hello::HelloError;
use dewar_wire::pages::PagesError;
use std::io;
use std::time::Duration;

/// Why memory did not get to the other host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// A connection failed.
    #[error("{operation} {}: {cause}", connection(*shard))]
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
    #[error("{} ended in the middle of the migration", connection(*.0))]
    Ended(u16),
    /// What arrived is not what was due.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// What arrived is no pages.
    #[error(transparent)]
    Pages(#[from] PagesError),
    /// A page is said to be like one that is not there to be compared with.
    #[error("a page that arrived refers to page {0}, which has not come on its connection")]
    Refers(PageNumber),
    /// A frame that has no place here.
    #[error("a frame that is not due arrived on {}", connection(*.0))]
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
    /// A GPU is to be used always, and fails.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A GPU is to be used always.
    #[error("this machine has no GPU that its drivers show: neither by CUDA nor by OpenCL")]
    NoGpu,
    /// Memory cannot be read or written.
    #[error("memory: {0}")]
    Memory(#[from] KernelError),
    /// The guest.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The two sides do not speak the same protocol.
    #[error(transparent)]
    Hello(#[from] HelloError),
    /// A message of the control connection is none.
    #[error("a message of the control connection: {0}")]
    Message(#[source] serde_json::Error),
    /// The other side ended before it said a word.
    #[error("the other host did not answer")]
    NoAnswer,
    /// The other side does not say that it is at work.
    #[error("the other host has said nothing for {} seconds", .0.as_secs())]
    Silent(Duration),
    /// A direct connection cannot be secured.
    #[error("TLS: {0}")]
    Tls(String),
    /// Pages that are missing do not come any more.
    #[error("the rest of its memory: {0}")]
    NoMore(String),
    /// Pages that are put in place one by one cannot be huge.
    #[error("its memory comes in huge pages here, and cannot arrive while it runs")]
    HugePages,
    /// The other side cannot go on.
    #[error("the other host: {0}")]
    Failed(String),
}

/// A connection by its name.
fn connection(shard: u16) -> String {
    match shard {
        CONTROL => "the control connection".to_owned(),
        shard => format!("connection {shard}"),
    }
}
