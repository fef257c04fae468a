//! A frame: up to 64 pages, compressed together, with a header that says what
//! and where it is.

use crate::{ImageError, SegmentId};
use dewar_codec::{Codec, FrameDecoder};
use dewar_units::PAGE_BYTES;
use twox_hash::XxHash3_128;

/// The most pages in a frame.
pub const FRAME_PAGES: usize = 64;

pub(crate) const FRAME_HEADER_BYTES: usize = 96;
const MAGIC: [u8; 4] = *b"DWRF";
/// A frame of a segment without an id, and of one that has one: then that is a part of what
/// the checksum covers.
const VERSION: u16 = 1;
const VERSION_WITH_ID: u16 = 2;
const CHECKSUM_AT: usize = 80;

/// Who a frame is: the part of its header that its place must agree with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// The store that it was written to.
    pub store: [u8; 16],
    /// Its segment.
    pub segment: u64,
    /// Its segment's id.
    pub segment_id: SegmentId,
    /// Its number there.
    pub frame: u16,
    /// How its pages are stored.
    pub codec: Codec,
    /// How many pages it holds.
    pub pages: u16,
    /// Bytes behind the header.
    pub stored_bytes: u32,
}

impl FrameHeader {
    /// The header's bytes, which the payload's follow.
    pub(crate) fn encode(&self, payload: &[u8]) -> [u8; FRAME_HEADER_BYTES] {
        let mut header = [0; FRAME_HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(4, &version_of(self.segment_id).to_le_bytes());
        put(6, &(FRAME_HEADER_BYTES as u16).to_le_bytes());
        put(12, &[self.codec as u8]);
        put(14, &self.pages.to_le_bytes());
        put(16, &self.store);
        put(32, &self.segment.to_le_bytes());
        put(40, &u32::from(self.frame).to_le_bytes());
        put(44, &self.stored_bytes.to_le_bytes());
        let checksum = checksum(self.segment_id, &header[..CHECKSUM_AT], payload);
        header[CHECKSUM_AT..].copy_from_slice(&checksum);
        header
    }

    /// Reads and checks a frame that should be `frame` of `segment`, which has this id, in
    /// `store`. Returns its header and payload.
    pub(crate) fn parse(
        bytes: &[u8],
        store: [u8; 16],
        (segment, segment_id): (u64, SegmentId),
        frame: u16,
    ) -> Result<(Self, &[u8]), ImageError> {
        let place = || format!("frame {frame} of segment {segment:016x}");
        let damaged = |problem: &str| ImageError::damaged(place(), problem);
        if bytes.len() < FRAME_HEADER_BYTES || bytes[..4] != MAGIC {
            return Err(damaged("there is no frame where it should be"));
        }
        let (header, payload) = bytes.split_at(FRAME_HEADER_BYTES);
        let short = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let word = |at: usize| u32::from(short(at)) | (u32::from(short(at + 2)) << 16);
        let long = |at: usize| u64::from(word(at)) | (u64::from(word(at + 4)) << 32);
        let fits = checksum(segment_id, &header[..CHECKSUM_AT], payload) == header[CHECKSUM_AT..];
        if short(4) != version_of(segment_id) || word(8) != 0 || header[13] != 0 {
            // A flipped bit may look like a newer version: the checksum decides.
            if fits {
                return Err(ImageError::TooNew {
                    place: place(),
                    problem: format!("version {} features {:#x}", short(4), word(8)),
                });
            }
            return Err(damaged("its checksum does not fit"));
        }
        if word(44) as usize != payload.len() {
            return Err(damaged("its length is not the one in the segment's directory"));
        }
        if !fits {
            return Err(damaged("its checksum does not fit"));
        }
        if header[16..32] != store || long(32) != segment || word(40) != u32::from(frame) {
            return Err(damaged(&format!(
                "it is frame {} of segment {:016x}, in the wrong place",
                word(40),
                long(32)
            )));
        }
        let codec = Codec::from_number(header[12])
            .ok_or_else(|| damaged(&format!("its codec {} is unknown", header[12])))?;
        let pages = short(14);
        if pages == 0 || usize::from(pages) > FRAME_PAGES {
            return Err(damaged(&format!("it claims {pages} pages")));
        }
        let stored_bytes = word(44);
        Ok((Self { store, segment, segment_id, frame, codec, pages, stored_bytes }, payload))
    }

    /// Whether a payload is the pages as they are.
    pub(crate) fn is_pages(&self, payload: &[u8]) -> bool {
        self.codec == Codec::Raw && payload.len() == usize::from(self.pages) * PAGE_BYTES
    }

    /// Expands a payload into whole pages.
    pub(crate) fn expand(
        &self,
        payload: &[u8],
        decoder: &mut FrameDecoder,
        out: &mut Vec<u8>,
    ) -> Result<(), ImageError> {
        decoder.decode(self.codec, payload, usize::from(self.pages) * PAGE_BYTES, out).map_err(
            |error| {
                let place = format!("frame {} of segment {:016x}", self.frame, self.segment);
                ImageError::damaged(place, error.to_string())
            },
        )
    }
}

fn version_of(segment: SegmentId) -> u16 {
    if segment.is_none() { VERSION } else { VERSION_WITH_ID }
}

fn checksum(segment: SegmentId, header: &[u8], payload: &[u8]) -> [u8; 16] {
    let mut hasher = XxHash3_128::new();
    if !segment.is_none() {
        hasher.write(segment.bytes());
    }
    hasher.write(header);
    hasher.write(payload);
    hasher.finish_128().to_le_bytes()
}
