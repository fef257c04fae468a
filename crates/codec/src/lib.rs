//! Page codecs on the CPU.
//!
//! A codec turns a *frame*, some whole pages, into fewer bytes and back.
//! Which codec a frame uses is decided page by page before: zero pages are not
//! stored at all, pages that no codec would shrink are kept apart and stored
//! [`Codec::Raw`], so that they cost a copy and nothing more. How much the others are worth
//! compressing is the [`Planner`]'s to say.
#![forbid(unsafe_code)]

mod classify;
mod feed;
mod frame;
mod planner;

pub use classify::{PageKind, classify};
pub use feed::{Feed, MeasuredEncoder};
pub use frame::{Codec, CodecError, Compression, FrameDecoder, FrameEncoder, PageCodec};
pub use planner::{Frame, Planner};
