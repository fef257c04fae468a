//! Reading back pages that a writer stored a moment ago, to compare.

use crate::segment::{SegmentBuilder, SegmentFile};
use crate::{ImageError, PageAddress, Store};
use dewar_codec::FrameDecoder;
use dewar_units::PAGE_BYTES;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Frames kept expanded: those that pages just put may be copies of.
const KEPT: usize = 8;
/// Segments kept open.
const OPEN_SEGMENTS: usize = 64;
/// What a page that is stored, and one that need not be, earn; reading back a
/// frame costs [`FRAME`]. Single copies here and there do not pay for it.
const STORED: i64 = 1;
const SPARED: i64 = 4;
const FRAME: i64 = 32;
const AT_FIRST: i64 = 64 * FRAME;
const AT_MOST: i64 = 256 * FRAME;

/// One thread's way to pages that are stored already.
pub(crate) struct StoredPages {
    decoder: FrameDecoder,
    segments: HashMap<u64, SegmentFile>,
    frames: Vec<((u64, u16), Vec<u8>)>,
    stored: Vec<u8>,
    budget: i64,
}

impl StoredPages {
    pub(crate) fn new() -> Result<Self, ImageError> {
        Ok(Self {
            decoder: FrameDecoder::new()?,
            segments: HashMap::new(),
            frames: Vec::new(),
            stored: Vec::new(),
            budget: AT_FIRST,
        })
    }

    /// Says that a page was stored.
    pub(crate) fn earn(&mut self) {
        self.budget = (self.budget + STORED).min(AT_MOST);
    }

    /// Whether the page at `at` is `page`, byte for byte. Where that cannot be
    /// told, or costs too much, it is not. `open` is the segment in the making.
    pub(crate) fn is_at(
        &mut self,
        page: &[u8],
        at: PageAddress,
        store: &Store,
        open: Option<&SegmentBuilder>,
    ) -> bool {
        let place = (at.segment, at.frame);
        if !self.frames.iter().any(|(kept, _)| *kept == place) {
            if self.budget < FRAME {
                return false;
            }
            // A segment may not have arrived in the store yet: asked for in vain,
            // it costs what the page that is stored then earns.
            self.budget -= STORED;
            let Ok(pages) = self.load(at, store, open) else { return false };
            self.budget -= FRAME;
            if self.frames.len() == KEPT {
                self.frames.remove(0);
            }
            self.frames.push((place, pages));
        }
        let frame = self.frames.iter().find(|(kept, _)| *kept == place);
        let start = usize::from(at.index) * PAGE_BYTES;
        let same = frame.is_some_and(|(_, pages)| {
            pages.get(start..start + PAGE_BYTES).is_some_and(|stored| stored == page)
        });
        if same {
            self.budget = (self.budget + SPARED).min(AT_MOST);
        }
        same
    }

    fn load(
        &mut self,
        at: PageAddress,
        store: &Store,
        open: Option<&SegmentBuilder>,
    ) -> Result<Vec<u8>, ImageError> {
        let mut pages = Vec::new();
        if let Some(open) = open.filter(|open| open.number() == at.segment) {
            let (header, payload) = open.read_frame(at.frame)?;
            header.expand(payload, &mut self.decoder, &mut pages)?;
            return Ok(pages);
        }
        if self.segments.len() >= OPEN_SEGMENTS {
            self.segments.clear();
        }
        let segment = match self.segments.entry(at.segment) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(place) => place.insert(store.segment(at.segment, None)?),
        };
        let (header, payload) = segment.read_frame(at.frame, &mut self.stored)?;
        header.expand(payload, &mut self.decoder, &mut pages)?;
        Ok(pages)
    }
}
