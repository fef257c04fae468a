//! Page codecs on the CPU.
//!
//! A codec turns a *frame*, some whole pages, into fewer bytes and back.
//! Which codec a frame uses is decided page by page before: zero pages are not
//! stored at all, pages that no codec would shrink are kept apart and stored
//! [`Codec::Raw`], so that they cost a copy and nothing more.
#![forbid(unsafe_code)]

mod classify;
mod frame;

pub use classify::{PageKind, classify};
pub use frame::{Codec, CodecError, FrameDecoder, FrameEncoder, PageCodec};
