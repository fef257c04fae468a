//! What threads that encode frames and those that write or send them tell each other: the clock of a
//! [`Planner`].

use crate::frame::{Codec, CodecError, Compression, FrameEncoder};
use crate::planner::{Frame, Planner};
use std::time::Instant;

/// How the frames for one sink are compressed: a store, or the connections of a migration.
#[derive(Debug)]
pub struct Feed {
    began: Instant,
    compression: Compression,
    planner: Planner,
}

impl Feed {
    /// For a sink that is given so many bytes before it has taken any.
    pub fn new(compression: Compression, room: usize) -> Self {
        Self { began: Instant::now(), compression, planner: Planner::new(room as u64) }
    }

    /// The codec of frames that are few, and read by all.
    pub fn codec_of_tables(&self) -> Codec {
        match self.compression {
            Compression::Only(codec) => codec,
            Compression::Auto => Codec::Zstd,
        }
    }

    /// Says how many bytes of pages come, in all.
    pub fn expect(&self, bytes: u64) {
        self.planner.expect(bytes);
    }

    /// How many bytes make a piece full, of so many at most.
    pub fn piece_bytes(&self, most: usize) -> usize {
        match self.compression {
            Compression::Only(_) => most,
            Compression::Auto => self.planner.piece_bytes(most as u64) as usize,
        }
    }

    /// A piece was given to the threads that write.
    pub fn given(&self, bytes: usize) {
        self.planner.given(bytes as u64, self.began.elapsed());
    }

    /// The sink has it.
    pub fn taken(&self, bytes: usize) {
        self.planner.taken(bytes as u64, self.began.elapsed());
    }

    /// Whether no codec is used.
    pub fn sends_all_raw(&self) -> bool {
        self.compression == Compression::Only(Codec::Raw)
    }

    /// Whether the sink has so much before it that the threads may do more than they must.
    pub fn is_busy(&self) -> bool {
        self.planner.is_busy()
    }

    /// Whether codecs are chosen while it runs.
    pub fn chooses(&self) -> bool {
        self.compression == Compression::Auto
    }

    /// Whether the sink outruns the cores so much that a GPU may be of use.
    pub fn cores_are_short(&self) -> bool {
        self.planner.cores_are_short()
    }

    /// Whether a batch of so many bytes of pages is best given to the GPU that there is, where so many bytes are
    /// left of its piece.
    pub fn gpu_pays(&self, left: usize, batch: usize) -> bool {
        self.planner.gpu_pays(left as u64, batch as u64)
    }

    /// Says what the GPU made of a batch, and how long a thread had to do with it.
    pub fn learn_gpu(&self, frame: &Frame) {
        self.planner.learn_gpu(frame);
    }

    /// The codec of a frame of pages, where so many bytes are left of its piece.
    fn codec(&self, left: usize) -> Codec {
        match self.compression {
            Compression::Only(codec) => codec,
            Compression::Auto => self.planner.choose(left as u64),
        }
    }

    fn learn(&self, codec: Codec, frame: &Frame) {
        if self.compression == Compression::Auto {
            self.planner.learn(codec, frame);
        }
    }
}

/// One thread's encoder for a [`Feed`]: it measures what it does.
pub struct MeasuredEncoder {
    encoder: FrameEncoder,
    /// When the last frame of pages was done.
    since: Instant,
    /// Bytes of pages since then that no codec shrinks.
    beside: u64,
}

impl MeasuredEncoder {
    /// One whose Zstandard has this level.
    pub fn new(level: i32) -> Self {
        let encoder = FrameEncoder::new(Codec::Zstd, level);
        Self { encoder, since: Instant::now(), beside: 0 }
    }

    /// Says that pages which no codec shrinks went into the piece as they are.
    pub fn passed(&mut self, bytes: usize) {
        self.beside += bytes as u64;
    }

    /// How many bytes it was told of so since the last frame; they are told to no frame more.
    pub fn take_passed(&mut self) -> u64 {
        std::mem::take(&mut self.beside)
    }

    /// Says that the thread waited for the sink: that was no work.
    pub fn waited(&mut self) {
        self.since = Instant::now();
    }

    /// Encodes a frame as much as there is time for, into a piece of which so many bytes are left.
    /// Returns the codec. The frame is in `out`, but where it is [`Codec::Raw`]: then it is the pages.
    ///
    /// # Errors
    /// Where the codec's library fails.
    pub fn encode(
        &mut self,
        feed: &Feed,
        pages: &[u8],
        left: usize,
        out: &mut Vec<u8>,
    ) -> Result<Codec, CodecError> {
        let wanted = feed.codec(left);
        let (began, other) = (Instant::now(), self.since.elapsed());
        let codec = match wanted {
            Codec::Raw => Codec::Raw,
            _ => self.encoder.encode_as(wanted, pages, out)?,
        };
        let made = if codec == Codec::Raw { pages.len() } else { out.len() };
        let frame = Frame {
            read: pages.len() as u64,
            made: made as u64,
            took: began.elapsed(),
            other,
            beside: std::mem::take(&mut self.beside),
        };
        feed.learn(wanted, &frame);
        // What it costs to use the frame belongs to the next one.
        self.since = Instant::now();
        Ok(codec)
    }

    /// The encoder itself, for frames that are not measured.
    pub fn unmeasured(&mut self) -> &mut FrameEncoder {
        &mut self.encoder
    }
}
