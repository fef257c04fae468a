//! Which pages of a guest's files are used, and reading them into the page cache before they are.
//!
//! A guest's files are those of some [trees](FileTree): a container's root file system and volumes, a virtual
//! machine's disks. For a while the kernel tells of each read ([`ReadWatch`]); pages that were read twice are *hot*. A
//! page that was read once is part of a scan, as of a backup, and of no use to anybody who reads it again. What is hot is
//! written down in a [`Manifest`]; [`warm`] reads it into the page cache, the most used first.
#![forbid(unsafe_code)]

mod error;
mod manifest;
mod reads;
mod tracefs;
mod tree;
mod warm;
mod watch;

pub use error::PageCacheError;
pub use manifest::{FileIdentity, HotFile, HotRange, MOST_MANIFEST_BYTES, Manifest};
pub use reads::Reads;
pub use tree::FileTree;
pub use warm::{FileCached, Warmed, cached, cached_hot, warm};
pub use watch::{ReadWatch, Watched};
