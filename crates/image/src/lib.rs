//! The checkpoint image format and the store that holds images.
//!
//! An image is a radix page table on disk: nodes of 512 entries whose leaves
//! point at pages. Pages and nodes alike lie in compressed *frames* inside
//! immutable *segments*; a *record*, written last, makes the image exist.
//! `docs/image-format.md` gives every byte.
//!
//! - Writing: [`Store::begin`] gives an [`ImageWriter`]; each thread puts
//!   pages through a [`PageSink`] of its own; [`ImageWriter::commit`] makes the
//!   image exist, and dropping the writer leaves nothing behind.
//! - Reading: [`Store::open_image`] gives an [`ImageReader`].
//! - [`verify`] reads everything; [`collect`] frees what no image needs;
//!   [`diff`] tells which pages differ.
#![forbid(unsafe_code)]

mod dedup;
mod diff;
mod dirty;
mod disks;
mod entry;
mod error;
mod files;
mod flush;
mod frame;
#[cfg(test)]
mod fuzz;
mod gc;
mod known;
mod lease;
mod reader;
mod record;
mod segment;
mod segment_id;
mod sink;
mod store;
mod stored;
mod table;
mod verify;
mod writer;

pub use dewar_store::{Location, RedisPlace, StoreError};

pub use dedup::Dedup;
pub use diff::diff;
pub use dirty::{DirtyStore, KeyedSink, KeyedSource};
pub use entry::{Entry, KeyedAddress, PageAddress, Place};
pub use error::ImageError;
pub use files::FileDigest;
pub use frame::{FRAME_PAGES, FrameHeader};
pub use gc::{Collected, collect};
pub use known::KnownPages;
pub use reader::{FrameCache, ImageReader};
pub use record::{
    Blob, CaptureCounts, DiskLayer, DiskRecord, EpochRecord, ImageId, MemoryRecord, PageCounts,
    Record, RegionRecord, StageRecord, Summary,
};
pub use segment::SEGMENT_BYTES;
pub use segment_id::SegmentId;
pub use sink::PageSink;
pub use store::{Deleted, Deletion, Store};
pub use table::ENTRIES_PER_NODE;
pub use verify::{Verified, verify};
pub use writer::{ImageOptions, ImageWriter};
