//! The memory of a guest whose process is dead, as a place where pages of its
//! checkpoint may still lie.
//!
//! A page is copied, the copy is compared with what the image knows of the page
//! by a fingerprint, and the copy is used. So it does not matter if another process
//! writes to the file meanwhile.

use dewar_image::{Entry, ImageError, ImageReader, KnownPages};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// RAM files that a dead guest left, one for each region of an image.
#[derive(Debug, Default)]
pub struct CrashedRam {
    files: Vec<(PageRange, File)>,
    known: KnownPages,
}

/// Neighbouring pages and what they hold.
pub(crate) struct Kept {
    pub first: PageNumber,
    pub bytes: Vec<u8>,
}

impl CrashedRam {
    /// Files of the same sizes as the image's regions, in their order. Without
    /// files no page is ever found.
    ///
    /// # Errors
    /// Where the image's store cannot be read.
    pub fn new(image: &ImageReader, files: Vec<File>) -> Result<Self, ImageError> {
        let regions = &image.record().memory.regions;
        if files.len() != regions.len() {
            return Ok(Self::default());
        }
        let mut first = 0;
        let place = |(region, file): (&dewar_image::RegionRecord, File)| {
            let range = PageRange::new(first, first + region.pages);
            first = range.end.0;
            (range, file)
        };
        let files = regions.iter().zip(files).map(place).collect();
        let known = image.known_pages()?;
        Ok(if known.is_empty() { Self::default() } else { Self { files, known } })
    }

    /// Parts `pages`, which ascend, into those that still lie here as the image
    /// has them, and the others.
    pub(crate) fn part(
        &self,
        entries: &[Entry],
        pages: impl Iterator<Item = PageNumber>,
    ) -> (Vec<Kept>, Vec<PageNumber>) {
        let (mut kept, mut others): (Vec<Kept>, _) = (Vec::new(), Vec::new());
        let mut content = [0; PAGE_BYTES];
        for page in pages {
            if !self.holds(page, entries[page.index()], &mut content) {
                others.push(page);
                continue;
            }
            match kept.last_mut() {
                Some(run) if run.first.0 + run.pages() == page.0 => {
                    run.bytes.extend_from_slice(&content);
                }
                _ => kept.push(Kept { first: page, bytes: content.to_vec() }),
            }
        }
        (kept, others)
    }

    /// Whether the page lies here as the image has it; then `content` is it.
    fn holds(&self, page: PageNumber, entry: Entry, content: &mut [u8]) -> bool {
        let Some((range, file)) = self.files.iter().find(|(range, _)| range.contains(page)) else {
            return false;
        };
        let at = (page.0 - range.start.0) * PAGE_BYTES as u64;
        self.known.knows(entry)
            && file.read_exact_at(content, at).is_ok()
            && self.known.is(entry, content)
    }
}

impl Kept {
    /// How many they are.
    pub fn pages(&self) -> u64 {
        (self.bytes.len() / PAGE_BYTES) as u64
    }
}
