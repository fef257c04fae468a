//! How an image is written.

use crate::dedup::Dedup;
use dewar_codec::Compression;

/// What an image is made of.
#[derive(Debug, Clone, Copy)]
pub struct ImageOptions {
    /// Pages of RAM.
    pub pages: u64,
    /// How pages are compressed that are worth it.
    pub compression: Compression,
    /// Zstandard's level.
    pub level: i32,
    /// Where the content of pages is looked for before they are stored.
    pub dedup: Dedup,
}
