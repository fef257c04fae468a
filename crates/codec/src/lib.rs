//! Page codecs on the CPU.
//!
//! A codec turns a *frame*, some whole pages, into fewer bytes and back.
//! Which codec a frame uses is decided page by page before: zero pages are not
//! stored at all, pages that no codec would shrink are kept apart and stored
//! [`Codec::Raw`], so that they cost a copy and nothing more. How much the others are worth
//! compressing is the [`Planner`]'s to say. A page of which a reader has nearly all already, or which says
//! nearly nothing, is words that differ ([`encode_words`]): that is found faster than any codec works.
#![forbid(unsafe_code)]

mod classify;
mod feed;
mod frame;
mod planner;
mod words;

pub use classify::{PageKind, classify, is_zero};
pub use feed::{Feed, MeasuredEncoder};
pub use frame::{Codec, CodecError, Compression, FrameDecoder, FrameEncoder, PageCodec};
pub use planner::{Frame, MOST_GPU_THREADS, Planner, SMALL_JOB_BYTES};
pub use words::{WordBase, decode_words, encode_words};
