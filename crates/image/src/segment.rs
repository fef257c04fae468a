//! A segment: an immutable file of frames, with a directory at its end.

use crate::frame::{FRAME_HEADER_BYTES, FrameHeader};
use crate::{ImageError, SegmentId, StoreError};
use dewar_codec::Codec;
use dewar_store::AlignedBytes;
use dewar_store::{Backend, LARGEST_OBJECT, Object};
use std::sync::atomic::{AtomicBool, Ordering};
use twox_hash::XxHash3_128;

/// A segment is closed when it has grown to this size.
pub const SEGMENT_BYTES: usize = 8 << 20;

// The last frame and the directory come on top.
const _: () = assert!(SEGMENT_BYTES + (1 << 20) <= LARGEST_OBJECT);

const HEADER_BYTES: usize = 64;
const TRAILER_BYTES: usize = 48;
const MAGIC: [u8; 8] = *b"DWRSEGMT";
const END_MAGIC: [u8; 8] = *b"DWRSEGND";
/// A segment without an id, and one that has one.
const VERSION: u16 = 1;
const VERSION_WITH_ID: u16 = 2;
/// Where a header has it.
const ID: std::ops::Range<usize> = 40..56;

/// What is said of a segment that is not the one that was written for an image.
const OTHER: &str = "it is another segment with that number: a copy of the store that went its own way was \
                     mixed with it, or a backup of another time";

/// A segment that is being made, in memory.
#[derive(Debug)]
pub(crate) struct SegmentBuilder {
    store: [u8; 16],
    number: u64,
    id: SegmentId,
    bytes: AlignedBytes,
    /// Where each frame starts.
    offsets: Vec<u32>,
}

impl SegmentBuilder {
    /// A new one in `bytes`, which is empty.
    pub(crate) fn new(
        store: [u8; 16],
        number: u64,
        id: SegmentId,
        mut bytes: AlignedBytes,
    ) -> Self {
        bytes.reserve(SEGMENT_BYTES + (1 << 20));
        let mut header = [0; HEADER_BYTES];
        header[0..8].copy_from_slice(&MAGIC);
        let version = if id.is_none() { VERSION } else { VERSION_WITH_ID };
        header[8..10].copy_from_slice(&version.to_le_bytes());
        header[10..12].copy_from_slice(&(HEADER_BYTES as u16).to_le_bytes());
        header[16..32].copy_from_slice(&store);
        header[32..40].copy_from_slice(&number.to_le_bytes());
        header[ID].copy_from_slice(id.bytes());
        bytes.extend(&header);
        Self { store, number, id, bytes, offsets: Vec::new() }
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Bytes that it has.
    pub(crate) fn filled(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.bytes.len() >= SEGMENT_BYTES || self.offsets.len() >= usize::from(u16::MAX)
    }

    /// Appends a frame; returns its number.
    pub(crate) fn append(&mut self, codec: Codec, pages: u16, payload: &[u8]) -> u16 {
        let frame = self.offsets.len() as u16;
        self.offsets.push(self.bytes.len() as u32);
        let header = FrameHeader {
            store: self.store,
            segment: self.number,
            segment_id: self.id,
            frame,
            codec,
            pages,
            stored_bytes: payload.len() as u32,
        };
        self.bytes.extend(&header.encode(payload));
        self.bytes.extend(payload);
        frame
    }

    /// Appends a frame as it is stored; without bytes it is a dropped one.
    pub(crate) fn append_stored(&mut self, frame: &[u8]) {
        self.offsets.push(self.bytes.len() as u32);
        self.bytes.extend(frame);
    }

    /// A frame that was appended.
    pub(crate) fn read_frame(&self, frame: u16) -> Result<(FrameHeader, &[u8]), ImageError> {
        let index = usize::from(frame);
        let missing = || {
            let place = format!("frame {frame} of segment {:016x}", self.number);
            ImageError::damaged(place, "its segment has no such frame")
        };
        let start = *self.offsets.get(index).ok_or_else(missing)? as usize;
        let end = self.offsets.get(index + 1).map_or(self.bytes.len(), |end| *end as usize);
        let segment = (self.number, self.id);
        FrameHeader::parse(&self.bytes[start..end], self.store, segment, frame)
    }

    /// The segment's number and all its bytes, directory included.
    pub(crate) fn finish(mut self) -> (u64, AlignedBytes) {
        let directory_at = self.bytes.len() as u32;
        for offset in &self.offsets {
            self.bytes.extend(&offset.to_le_bytes());
        }
        let mut trailer = [0; TRAILER_BYTES];
        trailer[0..4].copy_from_slice(&directory_at.to_le_bytes());
        trailer[4..8].copy_from_slice(&(self.offsets.len() as u32).to_le_bytes());
        trailer[40..48].copy_from_slice(&END_MAGIC);
        let checksum = end_checksum(
            &self.bytes[..HEADER_BYTES],
            &self.bytes[directory_at as usize..],
            &trailer[..8],
        );
        trailer[8..24].copy_from_slice(&checksum);
        self.bytes.extend(&trailer);
        (self.number, self.bytes)
    }
}

/// Covers all of a segment that is not frames: header, directory, trailer.
fn end_checksum(header: &[u8], directory: &[u8], trailer: &[u8]) -> [u8; 16] {
    let mut hasher = XxHash3_128::new();
    hasher.write(header);
    hasher.write(directory);
    hasher.write(trailer);
    hasher.finish_128().to_le_bytes()
}

/// The object's name in a store.
pub(crate) fn segment_name(number: u64) -> String {
    format!("segments/{number:016x}.seg")
}

/// A segment file, opened for reading; its directory is checked and in memory.
#[derive(Debug)]
pub(crate) struct SegmentFile {
    object: Box<dyn Object>,
    store: [u8; 16],
    number: u64,
    id: SegmentId,
    offsets: Vec<u32>,
    directory_at: u32,
    /// Whether it was asked for.
    ahead: AtomicBool,
}

impl SegmentFile {
    /// Opens the segment with this number, which is to have this id, where one is known.
    pub(crate) fn open(
        backend: &dyn Backend,
        store: [u8; 16],
        number: u64,
        expected: Option<SegmentId>,
    ) -> Result<Self, ImageError> {
        let name = segment_name(number);
        let object = backend.open(&name)?;
        let damaged =
            |problem: &str| ImageError::damaged(format!("{name} of {}", backend.url()), problem);
        let length = object.bytes();
        if length < (HEADER_BYTES + TRAILER_BYTES) as u64 || length > u64::from(u32::MAX) {
            return Err(damaged("its length is impossible"));
        }
        let [mut header, mut trailer, mut directory] = [const { Vec::new() }; 3];
        object.read_at(0, HEADER_BYTES, &mut header)?;
        object.read_at(length - TRAILER_BYTES as u64, TRAILER_BYTES, &mut trailer)?;
        let word = |at: usize| {
            u32::from_le_bytes([trailer[at], trailer[at + 1], trailer[at + 2], trailer[at + 3]])
        };
        let (directory_at, count) = (word(0), word(4));
        let directory_end = length - TRAILER_BYTES as u64;
        if trailer[40..] != END_MAGIC || trailer[24..40] != [0; 16] {
            return Err(damaged("its end is missing or altered"));
        }
        if u64::from(directory_at) + u64::from(count) * 4 != directory_end {
            return Err(damaged("its directory is not where its end says"));
        }
        object.read_at(u64::from(directory_at), count as usize * 4, &mut directory)?;
        if end_checksum(&header, &directory, &trailer[..8]) != trailer[8..24] {
            return Err(damaged("the checksum of its header and directory does not fit"));
        }
        let version = u16::from_le_bytes([header[8], header[9]]);
        if header[..8] != MAGIC || header[16..32] != store || header[32..40] != number.to_le_bytes()
        {
            return Err(damaged("it is another segment, or of another store"));
        }
        let id = SegmentId::from_bytes(&header[ID]);
        let fits = match version {
            VERSION => id.is_none(),
            VERSION_WITH_ID => !id.is_none(),
            _ => false,
        };
        if !fits || header[12..16] != [0; 4] || header[ID.end..] != [0; HEADER_BYTES - ID.end] {
            return Err(ImageError::TooNew {
                place: format!("{name} of {}", backend.url()),
                problem: format!("segment version {version}"),
            });
        }
        if expected.is_some_and(|expected| expected != id) {
            return Err(damaged(OTHER));
        }
        let offsets = directory
            .chunks_exact(4)
            .map(|offset| u32::from_le_bytes([offset[0], offset[1], offset[2], offset[3]]))
            .collect();
        let ahead = AtomicBool::new(false);
        Ok(Self { object, store, number, id, offsets, directory_at, ahead })
    }

    /// Asks for all of it to be read ahead; the first time only.
    pub(crate) fn read_ahead(&self) {
        if !self.ahead.swap(true, Ordering::Relaxed) {
            self.object.read_ahead();
        }
    }

    /// What tells it from others with its number.
    pub(crate) fn id(&self) -> SegmentId {
        self.id
    }

    pub(crate) fn frames(&self) -> u16 {
        self.offsets.len() as u16
    }

    /// Bytes that a frame takes, header and payload; none where it was dropped.
    pub(crate) fn frame_bytes(&self, frame: u16) -> u64 {
        let index = usize::from(frame);
        let Some(start) = self.offsets.get(index) else { return 0 };
        let end = self.offsets.get(index + 1).unwrap_or(&self.directory_at);
        u64::from(end.saturating_sub(*start))
    }

    /// Reads the bytes of a frame into `buffer` and checks them.
    pub(crate) fn read_frame<'b>(
        &self,
        frame: u16,
        buffer: &'b mut Vec<u8>,
    ) -> Result<(FrameHeader, &'b [u8]), ImageError> {
        let place = || format!("frame {frame} of segment {:016x}", self.number);
        let index = usize::from(frame);
        let start = *self
            .offsets
            .get(index)
            .ok_or_else(|| ImageError::damaged(place(), "its segment has no such frame"))?;
        let end = self.offsets.get(index + 1).copied().unwrap_or(self.directory_at);
        let length = end.saturating_sub(start) as usize;
        if length < FRAME_HEADER_BYTES || end > self.directory_at {
            return Err(ImageError::damaged(place(), "the directory leaves it no room"));
        }
        self.object.read_at(u64::from(start), length, buffer).map_err(|error| match error {
            StoreError::Io { cause, .. } => ImageError::damaged(place(), cause.to_string()),
            other => other.into(),
        })?;
        FrameHeader::parse(buffer, self.store, (self.number, self.id), frame)
    }
}
