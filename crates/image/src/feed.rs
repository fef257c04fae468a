//! How the frames of an image are compressed, and for a store of which speed.

use dewar_codec::{Codec, Compression, Frame, Planner};
use std::time::Instant;

/// What the threads that encode and those that write tell each other.
pub(crate) struct Feed {
    began: Instant,
    compression: Compression,
    planner: Planner,
}

impl Feed {
    /// For a store that is given so many bytes before it has taken any.
    pub(crate) fn new(compression: Compression, room: usize) -> Self {
        Self { began: Instant::now(), compression, planner: Planner::new(room as u64) }
    }

    /// The codec of a frame of pages, where so many bytes are left of its segment.
    pub(crate) fn codec(&self, left: usize) -> Codec {
        match self.compression {
            Compression::Only(codec) => codec,
            Compression::Auto => self.planner.choose(left as u64),
        }
    }

    /// The codec of frames that are few, and read by all.
    pub(crate) fn codec_of_tables(&self) -> Codec {
        match self.compression {
            Compression::Only(codec) => codec,
            Compression::Auto => Codec::Zstd,
        }
    }

    /// How many bytes make a segment full, of so many at most.
    pub(crate) fn segment_bytes(&self, most: usize) -> usize {
        match self.compression {
            Compression::Only(_) => most,
            Compression::Auto => self.planner.piece_bytes(most as u64) as usize,
        }
    }

    /// A frame was encoded.
    pub(crate) fn learn(&self, codec: Codec, frame: &Frame) {
        if self.compression == Compression::Auto {
            self.planner.learn(codec, frame);
        }
    }

    /// A segment was given to the threads that write.
    pub(crate) fn given(&self, bytes: usize) {
        self.planner.given(bytes as u64, self.began.elapsed());
    }

    /// It is in the store.
    pub(crate) fn taken(&self, bytes: usize) {
        self.planner.taken(bytes as u64, self.began.elapsed());
    }
}
