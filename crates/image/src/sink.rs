use crate::dedup::Fingerprint;
use crate::segment::{SEGMENT_BYTES, SegmentBuilder};
use crate::stored::StoredPages;
use crate::{Entry, FRAME_PAGES, ImageError, ImageWriter, PageAddress};
use dewar_codec::{Codec, MeasuredEncoder, PageKind, classify};
use dewar_units::{PAGE_BYTES, PageNumber};
use std::collections::HashMap;

/// One thread's way into an image: groups pages into frames, frames into
/// segments of its own. [`PageSink::finish`] it before the image is finished.
pub struct PageSink<'w, 's> {
    writer: &'w ImageWriter<'s>,
    /// Whether our pages give way to those that others put or claimed.
    yields: bool,
    encoder: MeasuredEncoder,
    compressible: OpenFrame,
    incompressible: OpenFrame,
    segment: Option<SegmentBuilder>,
    /// The payload of the frame being encoded.
    payload: Vec<u8>,
    /// To compare with, where fingerprints are no proof.
    stored: Option<StoredPages>,
    /// Pages in our segment in the making that were stored though another with
    /// their fingerprint is: in one that nobody else can read yet, perhaps.
    again: HashMap<Fingerprint, PageAddress>,
}

/// Pages that wait until their frame is full.
#[derive(Default)]
struct OpenFrame {
    bytes: Vec<u8>,
    pages: Vec<PageNumber>,
    /// Theirs, where they are looked for.
    prints: Vec<Fingerprint>,
}

impl<'w, 's> PageSink<'w, 's> {
    pub(crate) fn new(
        writer: &'w ImageWriter<'s>,
        level: i32,
        yields: bool,
    ) -> Result<Self, ImageError> {
        let compares = writer.fingerprints().is_some_and(|prints| !prints.is_proof());
        Ok(Self {
            stored: compares.then(StoredPages::new).transpose()?,
            again: HashMap::new(),
            writer,
            yields,
            encoder: MeasuredEncoder::new(level),
            compressible: OpenFrame::default(),
            incompressible: OpenFrame::default(),
            segment: None,
            payload: Vec::new(),
        })
    }

    /// Puts a page of RAM; a page put again replaces the one before, if that
    /// one's sink was flushed in between.
    ///
    /// # Errors
    /// Where the store cannot be written.
    ///
    /// # Panics
    /// Where the image has no such page.
    pub fn put(&mut self, page: PageNumber, bytes: &[u8]) -> Result<PageKind, ImageError> {
        let kind = classify(bytes);
        if kind == PageKind::Zero {
            self.set(page, Entry::ZERO);
            return Ok(kind);
        }
        let print = self.writer.fingerprints().map(|prints| prints.of(bytes));
        if let Some(at) = print.and_then(|print| self.same_page(&print, bytes)) {
            self.set(page, Entry::packed(at));
            return Ok(kind);
        }
        let frame = match kind {
            PageKind::Compressible => &mut self.compressible,
            _ => &mut self.incompressible,
        };
        frame.bytes.extend_from_slice(bytes);
        frame.pages.push(page);
        frame.prints.extend(print);
        if frame.pages.len() == FRAME_PAGES {
            self.close_frame(kind)?;
        }
        Ok(kind)
    }

    fn set(&self, page: PageNumber, entry: Entry) {
        match self.yields {
            true => self.writer.set_if_open(page.index(), entry),
            false => self.writer.set(page.index(), entry),
        }
    }

    /// Where a page with the same content lies.
    fn same_page(&mut self, print: &Fingerprint, bytes: &[u8]) -> Option<PageAddress> {
        let prints = self.writer.fingerprints()?;
        let at = self.again.get(print).copied().or_else(|| prints.find(print));
        let found = match (at, &mut self.stored) {
            (Some(at), Some(stored)) => {
                stored.is_at(bytes, at, self.writer.store(), self.segment.as_ref()).then_some(at)
            }
            (at, _) => at,
        };
        match (found, &mut self.stored) {
            (Some(_), _) => prints.count_duplicate(),
            (None, Some(stored)) => stored.earn(),
            (None, None) => {}
        }
        found
    }

    /// Puts pages that are not RAM and returns their entries.
    pub(crate) fn put_unnumbered(&mut self, pages: &[Vec<u8>]) -> Result<Vec<Entry>, ImageError> {
        let mut entries = Vec::with_capacity(pages.len());
        for group in pages.chunks(FRAME_PAGES) {
            let bytes = group.concat();
            let codec = self.writer.feed().codec_of_tables();
            let at = self.encode(codec, &bytes)?;
            entries.extend(addresses(at, group.len()));
        }
        Ok(entries)
    }

    /// Gives every page put so far its entry.
    ///
    /// # Errors
    /// Where the store cannot be written.
    pub fn flush(&mut self) -> Result<(), ImageError> {
        self.close_frame(PageKind::Compressible)?;
        self.close_frame(PageKind::Incompressible)
    }

    /// Writes out what is left.
    ///
    /// # Errors
    /// Where the store cannot be written.
    pub fn finish(mut self) -> Result<(), ImageError> {
        self.flush()?;
        self.close_segment()
    }

    fn close_frame(&mut self, kind: PageKind) -> Result<(), ImageError> {
        let frame = match kind {
            PageKind::Compressible => std::mem::take(&mut self.compressible),
            _ => std::mem::take(&mut self.incompressible),
        };
        if frame.pages.is_empty() {
            return Ok(());
        }
        let at = match kind {
            PageKind::Compressible => self.encode_measured(&frame.bytes)?,
            _ => {
                self.encoder.passed(frame.bytes.len());
                self.append(Codec::Raw, frame.pages.len(), &frame.bytes)?
            }
        };
        for (page, entry) in frame.pages.iter().zip(addresses(at, frame.pages.len())) {
            self.set(*page, entry);
        }
        if let Some(prints) = self.writer.fingerprints() {
            for (index, print) in (0u8..).zip(&frame.prints) {
                let at = PageAddress { index, ..at };
                if !prints.learn(*print, at) {
                    self.again.insert(*print, at);
                }
            }
        }
        let OpenFrame { mut bytes, mut pages, mut prints } = frame;
        bytes.clear();
        pages.clear();
        prints.clear();
        let emptied = OpenFrame { bytes, pages, prints };
        match kind {
            PageKind::Compressible => self.compressible = emptied,
            _ => self.incompressible = emptied,
        }
        Ok(())
    }

    /// Appends pages as a frame, compressed as much as there is time for.
    fn encode_measured(&mut self, bytes: &[u8]) -> Result<PageAddress, ImageError> {
        let feed = self.writer.feed();
        let filled = self.segment.as_ref().map_or(0, SegmentBuilder::filled);
        let left = SEGMENT_BYTES.saturating_sub(filled);
        let mut payload = std::mem::take(&mut self.payload);
        let codec = self.encoder.encode(feed, bytes, left, &mut payload)?;
        let made = if codec == Codec::Raw { bytes } else { &payload };
        let at = self.append(codec, bytes.len() / PAGE_BYTES, made);
        self.payload = payload;
        let full = feed.piece_bytes(SEGMENT_BYTES);
        if self.segment.as_ref().is_some_and(|segment| segment.filled() >= full) {
            self.close_segment()?;
        }
        at
    }

    /// Compresses pages and appends them as a frame; returns the address of the first.
    fn encode(&mut self, codec: Codec, bytes: &[u8]) -> Result<PageAddress, ImageError> {
        let mut payload = std::mem::take(&mut self.payload);
        let codec = self.encoder.unmeasured().encode_as(codec, bytes, &mut payload)?;
        let at = self.append(codec, bytes.len() / PAGE_BYTES, &payload);
        self.payload = payload;
        at
    }

    /// Appends a frame of so many pages; returns the address of the first.
    fn append(
        &mut self,
        codec: Codec,
        pages: usize,
        payload: &[u8],
    ) -> Result<PageAddress, ImageError> {
        if self.segment.as_ref().is_some_and(SegmentBuilder::is_full) {
            self.close_segment()?;
        }
        let segment = match &mut self.segment {
            Some(segment) => segment,
            none => {
                let number = self.writer.next_segment()?;
                let memory = self.writer.segment_buffer();
                let id = self.writer.segment_id(number);
                none.insert(SegmentBuilder::new(self.writer.raw_store_id(), number, id, memory))
            }
        };
        let frame = segment.append(codec, pages as u16, payload);
        let at = PageAddress { segment: segment.number(), frame, index: 0 };
        if codec == Codec::Raw {
            self.writer.note_raw(at);
        }
        Ok(at)
    }

    fn close_segment(&mut self) -> Result<(), ImageError> {
        self.again.clear();
        let Some(segment) = self.segment.take() else { return Ok(()) };
        let (number, bytes) = segment.finish();
        self.writer.submit(number, bytes)?;
        self.encoder.waited();
        Ok(())
    }
}

/// The entries of a frame's pages.
fn addresses(first: PageAddress, count: usize) -> impl Iterator<Item = Entry> {
    debug_assert!(count * PAGE_BYTES <= FRAME_PAGES * PAGE_BYTES);
    (0..count as u8).map(move |index| Entry::packed(PageAddress { index, ..first }))
}
