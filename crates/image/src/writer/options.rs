//! How an image is written.

use crate::Store;
use crate::dedup::Dedup;
use dewar_codec::{Codec, Compression};
use dewar_units::PAGE_BYTES;

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

impl ImageOptions {
    /// How pages are compressed in this store: as much as can be where it has no room for all of them as
    /// they are, whatever time that takes.
    pub(crate) fn compression_in(&self, store: &Store) -> Compression {
        let is_tight = !store.backend().has_ample_room(self.pages * PAGE_BYTES as u64);
        match self.compression {
            Compression::Auto if is_tight => Compression::Only(Codec::Zstd),
            wanted => wanted,
        }
    }
}
