//! Moving a running guest's memory to another host.
//!
//! The source reads pages through Dewar's own mapping of the guest's RAM, compresses them as much as there
//! is time for while the link sends, and sends them over several connections ([`PageSender`]). The
//! destination writes them into RAM files of its own ([`PageReceiver`], [`NewMemory`]). [`Precopy`] is the
//! source's order of things; a GPU helps where it pays ([`GpuUse`]); in a post-copy [`Postcopy`] and [`OwedMemory`] go on when the guest runs; [`Control`] is what the two sides say to each other. What is on a connection is
//! [`dewar_wire`]'s; where it comes from ([a tunnel](TunnelWriter), [TLS](DirectListener), a socket of a test) is the caller's.
#![forbid(unsafe_code)]

mod control;
mod disk;
mod error;
mod feeder;
mod frames;
mod gpu;
mod new_memory;
mod owed;
mod postcopy;
mod receive;
mod send;
mod sent;
mod sink;
mod source;
mod tls;
mod tunnel;

pub use control::{Control, Heard};
pub use disk::{carry_disk, cut_disk};
pub use error::MigrateError;
pub use frames::{FrameReader, FrameWriter};
pub use gpu::{GpuHelp, GpuUse, GpuUsed};
pub use new_memory::NewMemory;
pub use owed::OwedMemory;
pub use postcopy::Postcopy;
pub use receive::{PageReceiver, Received};
pub use send::PageSender;
pub use sent::{ComesAgain, SentMemory};
pub use sink::PageSink;
pub use source::Precopy;
pub use tls::{DirectListener, DirectReader, DirectWriter, Identity, connect};
pub use tunnel::{TunnelReader, TunnelWriter, take_apart};
