//! How the frames of an image are compressed, and for a store of which speed.

use dewar_codec::{Codec, Compression, Planner};
use std::time::{Duration, Instant};

/// What the threads that encode and those that write tell each other.
pub(crate) struct Feed {
    began: Instant,
    compression: Compression,
    planner: Planner,
}

impl Feed {
    pub(crate) fn new(compression: Compression) -> Self {
        Self { began: Instant::now(), compression, planner: Planner::new() }
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

    /// A frame was encoded: bytes in and out, the time that it took, and the time that its pages took
    /// before.
    pub(crate) fn learn(
        &self,
        codec: Codec,
        read: usize,
        made: usize,
        took: Duration,
        other: Duration,
    ) {
        if self.compression == Compression::Auto {
            self.planner.learn(codec, read as u64, made as u64, took, other);
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
