use dewar_units::PAGE_BYTES;

/// How the pages of a frame are stored. The number is part of the image
/// format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// As they are.
    Raw = 0,
    /// LZ4 block format.
    Lz4 = 1,
    /// Zstandard, one frame.
    Zstd = 2,
}

impl Codec {
    /// The codec with this number in an image.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Raw, Self::Lz4, Self::Zstd].into_iter().find(|codec| *codec as u8 == number)
    }
}

/// A frame that cannot be encoded or decoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The compressed bytes are not what the codec writes.
    #[error("the {codec:?} data of a frame cannot be expanded: {cause}")]
    Damaged {
        /// The codec.
        codec: Codec,
        /// What its library says.
        cause: String,
    },
    /// The frame has another number of pages than it should.
    #[error("a frame expands to {found} bytes in place of {expected}")]
    WrongSize {
        /// Bytes that came out.
        found: usize,
        /// Bytes that the frame's header promises.
        expected: usize,
    },
    /// Words that differ end too soon or too late, or there are none where there should be.
    #[error("the words that differ are not as many as they should be")]
    WrongWords,
    /// The codec's library failed.
    #[error("{codec:?} failed: {cause}")]
    Library {
        /// The codec.
        codec: Codec,
        /// What its library says.
        cause: String,
    },
}

/// What turns pages into a frame's bytes and back. One value belongs to one
/// thread and keeps its working memory between calls.
pub trait PageCodec {
    /// Replaces `out` by the frame that holds `pages` (whole pages). Returns
    /// the codec that was used in the end: [`Codec::Raw`] where nothing was
    /// saved.
    ///
    /// # Errors
    /// Where the codec's library fails.
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<Codec, CodecError>;
}

/// How the frames of an image, or of a stream, are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// All by one codec.
    Only(Codec),
    /// Each as much as there is time for ([`Planner`](crate::Planner)).
    Auto,
}

/// Encodes frames, each with the codec that it is given.
pub struct FrameEncoder {
    codec: Codec,
    level: i32,
    /// Made when it is first needed.
    zstd: Option<zstd::bulk::Compressor<'static>>,
}

impl FrameEncoder {
    /// An encoder that uses `codec` where it is not told otherwise; `level` is Zstandard's and means
    /// nothing to the others.
    pub fn new(codec: Codec, level: i32) -> Self {
        Self { codec, level, zstd: None }
    }

    /// Replaces `out` by the frame that holds `pages`, as [`PageCodec::encode`] does, by this codec.
    ///
    /// # Errors
    /// Where the codec's library fails.
    pub fn encode_as(
        &mut self,
        codec: Codec,
        pages: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Codec, CodecError> {
        debug_assert_eq!(pages.len() % PAGE_BYTES, 0);
        let library = |cause: String| CodecError::Library { codec, cause };
        let bytes = match codec {
            Codec::Lz4 => {
                out.resize(lz4_flex::block::get_maximum_output_size(pages.len()), 0);
                lz4_flex::block::compress_into(pages, out)
                    .map_err(|error| library(error.to_string()))?
            }
            Codec::Zstd => {
                out.clear();
                out.reserve(zstd::zstd_safe::compress_bound(pages.len()));
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    none => none.insert(
                        zstd::bulk::Compressor::new(self.level)
                            .map_err(|error| library(error.to_string()))?,
                    ),
                };
                zstd.compress_to_buffer(pages, out).map_err(|error| library(error.to_string()))?
            }
            Codec::Raw => pages.len(),
        };
        if bytes >= pages.len() {
            out.clear();
            out.extend_from_slice(pages);
            return Ok(Codec::Raw);
        }
        out.truncate(bytes);
        Ok(codec)
    }
}

impl PageCodec for FrameEncoder {
    fn encode(&mut self, pages: &[u8], out: &mut Vec<u8>) -> Result<Codec, CodecError> {
        self.encode_as(self.codec, pages, out)
    }
}

/// Expands frames of any codec.
pub struct FrameDecoder {
    zstd: zstd::bulk::Decompressor<'static>,
}

impl FrameDecoder {
    /// A decoder.
    ///
    /// # Errors
    /// Where the library cannot be set up.
    pub fn new() -> Result<Self, CodecError> {
        zstd::bulk::Decompressor::new()
            .map(|zstd| Self { zstd })
            .map_err(|cause| CodecError::Library { codec: Codec::Zstd, cause: cause.to_string() })
    }

    /// Replaces `out` by the `expected` bytes of pages that `stored` holds.
    ///
    /// # Errors
    /// Where `stored` is damaged or holds another number of bytes.
    pub fn decode(
        &mut self,
        codec: Codec,
        stored: &[u8],
        expected: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let damaged = |cause: String| CodecError::Damaged { codec, cause };
        out.resize(expected, 0);
        let found = match codec {
            Codec::Raw => {
                out.clear();
                out.extend_from_slice(stored);
                stored.len()
            }
            Codec::Lz4 => lz4_flex::block::decompress_into(stored, out)
                .map_err(|error| damaged(error.to_string()))?,
            Codec::Zstd => self
                .zstd
                .decompress_to_buffer(stored, out.as_mut_slice())
                .map_err(|error| damaged(error.to_string()))?,
        };
        if found != expected {
            return Err(CodecError::WrongSize { found, expected });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn codecs() -> impl Strategy<Value = Codec> {
        prop_oneof![Just(Codec::Raw), Just(Codec::Lz4), Just(Codec::Zstd)]
    }

    /// Pages made of repeated pieces, so that some compress and some do not.
    fn pages() -> impl Strategy<Value = Vec<u8>> {
        (1usize..5, prop::collection::vec(any::<u8>(), 1..3000))
            .prop_map(|(count, piece)| piece.into_iter().cycle().take(count * PAGE_BYTES).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn pages_come_back(codec in codecs(), pages in pages()) {
            let mut encoder = FrameEncoder::new(codec, 1);
            let mut decoder = FrameDecoder::new().expect("decoder");
            let (mut stored, mut back) = (Vec::new(), Vec::new());
            let used = encoder.encode(&pages, &mut stored).expect("encode");
            prop_assert!(stored.len() <= pages.len());
            decoder.decode(used, &stored, pages.len(), &mut back).expect("decode");
            prop_assert_eq!(back, pages);
        }

        #[test]
        fn garbage_is_an_error_or_the_right_size(
            codec in codecs(),
            garbage in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            let mut out = Vec::new();
            let mut decoder = FrameDecoder::new().expect("decoder");
            if decoder.decode(codec, &garbage, PAGE_BYTES, &mut out).is_ok() {
                prop_assert_eq!(out.len(), PAGE_BYTES);
            }
        }
    }
}
