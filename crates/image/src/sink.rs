use crate::segment::SegmentBuilder;
use crate::{Entry, FRAME_PAGES, ImageError, ImageWriter, PageAddress};
use dewar_codec::{Codec, FrameEncoder, PageCodec, PageKind, classify};
use dewar_units::{PAGE_BYTES, PageNumber};

/// One thread's way into an image: groups pages into frames, frames into
/// segments of its own. [`PageSink::finish`] it before the image is finished.
pub struct PageSink<'w, 's> {
    writer: &'w ImageWriter<'s>,
    encoder: FrameEncoder,
    compressible: OpenFrame,
    incompressible: OpenFrame,
    segment: Option<SegmentBuilder>,
    /// The payload of the frame being encoded.
    payload: Vec<u8>,
}

/// Pages that wait until their frame is full.
#[derive(Default)]
struct OpenFrame {
    bytes: Vec<u8>,
    pages: Vec<PageNumber>,
}

impl<'w, 's> PageSink<'w, 's> {
    pub(crate) fn new(
        writer: &'w ImageWriter<'s>,
        codec: Codec,
        level: i32,
    ) -> Result<Self, ImageError> {
        Ok(Self {
            writer,
            encoder: FrameEncoder::new(codec, level)?,
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
        let frame = match kind {
            PageKind::Zero => {
                self.writer.set(page.index(), Entry::ZERO);
                return Ok(kind);
            }
            PageKind::Compressible => &mut self.compressible,
            PageKind::Incompressible => &mut self.incompressible,
        };
        frame.bytes.extend_from_slice(bytes);
        frame.pages.push(page);
        if frame.pages.len() == FRAME_PAGES {
            self.close_frame(kind)?;
        }
        Ok(kind)
    }

    /// Puts pages that are not RAM and returns their entries.
    pub(crate) fn put_unnumbered(&mut self, pages: &[Vec<u8>]) -> Result<Vec<Entry>, ImageError> {
        let mut entries = Vec::with_capacity(pages.len());
        for group in pages.chunks(FRAME_PAGES) {
            let bytes = group.concat();
            let codec = self.encoder.encode(&bytes, &mut self.payload)?;
            let at = self.append(codec, group.len())?;
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
        let codec = if kind == PageKind::Compressible {
            self.encoder.encode(&frame.bytes, &mut self.payload)?
        } else {
            self.payload.clear();
            self.payload.extend_from_slice(&frame.bytes);
            Codec::Raw
        };
        let at = self.append(codec, frame.pages.len())?;
        for (page, entry) in frame.pages.iter().zip(addresses(at, frame.pages.len())) {
            self.writer.set(page.index(), entry);
        }
        let OpenFrame { mut bytes, mut pages } = frame;
        bytes.clear();
        pages.clear();
        let emptied = OpenFrame { bytes, pages };
        match kind {
            PageKind::Compressible => self.compressible = emptied,
            _ => self.incompressible = emptied,
        }
        Ok(())
    }

    /// Appends the payload as a frame; returns the address of its first page.
    fn append(&mut self, codec: Codec, pages: usize) -> Result<PageAddress, ImageError> {
        if self.segment.as_ref().is_some_and(SegmentBuilder::is_full) {
            self.close_segment()?;
        }
        let segment = match &mut self.segment {
            Some(segment) => segment,
            none => {
                let number = self.writer.next_segment()?;
                let memory = self.writer.segment_buffer();
                none.insert(SegmentBuilder::new(self.writer.raw_store_id(), number, memory))
            }
        };
        let frame = segment.append(codec, pages as u16, &self.payload);
        let at = PageAddress { segment: segment.number(), frame, index: 0 };
        if codec == Codec::Raw {
            self.writer.note_raw(at);
        }
        Ok(at)
    }

    fn close_segment(&mut self) -> Result<(), ImageError> {
        let Some(segment) = self.segment.take() else { return Ok(()) };
        let (number, bytes) = segment.finish();
        self.writer.submit(number, bytes)
    }
}

/// The entries of a frame's pages.
fn addresses(first: PageAddress, count: usize) -> impl Iterator<Item = Entry> {
    debug_assert!(count * PAGE_BYTES <= FRAME_PAGES * PAGE_BYTES);
    (0..count as u8).map(move |index| Entry::packed(PageAddress { index, ..first }))
}
