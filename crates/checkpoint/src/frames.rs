//! Pages grouped by what is read together: the frame that holds them, so that
//! each frame is expanded once, or neighbours in a dirty store.

use crate::CheckpointError;
use dewar_image::{Entry, FrameCache, ImageError, ImageReader, PageAddress, Place};
use dewar_units::{PAGE_BYTES, PageNumber};

/// Pages of a dirty store that are read together.
const KEYED_TOGETHER: u64 = 64;
/// A key there holds 512 pages.
const STRETCHES_IN_KEY: u64 = 512 / KEYED_TOGETHER;

/// What pages have in common that are read together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Together {
    /// A frame of a segment.
    Frame { segment: u64, frame: u16 },
    /// A source and a stretch of page numbers.
    Keyed { source: u32, stretch: u64 },
}

impl Together {
    /// The source and the key there, of pages in a dirty store.
    pub(crate) fn part(self) -> Option<(u32, u64)> {
        match self {
            Self::Keyed { source, stretch } => Some((source, stretch / STRETCHES_IN_KEY)),
            Self::Frame { .. } => None,
        }
    }
}

/// Pages that are read together, in the order of their numbers.
pub(crate) struct Group {
    together: Together,
    /// Each page, and where it stands in what is read.
    pub pages: Vec<(PageNumber, usize)>,
    /// The seals of pages in a dirty store.
    seals: Vec<u64>,
}

/// Neighbouring pages of one group.
pub(crate) struct Run<'g>(&'g [(PageNumber, usize)]);

/// Groups those of `pages` that are not zeros.
pub(crate) fn grouped(
    entries: &[Entry],
    pages: impl Iterator<Item = PageNumber>,
) -> Result<Vec<Group>, CheckpointError> {
    let mut found = Vec::new();
    for page in pages {
        if let Some((together, detail)) = place(entries, page)? {
            found.push((together, page, detail));
        }
    }
    found.sort_unstable();
    found.dedup();
    let groups = found.chunk_by(|a, b| a.0 == b.0).map(|group| {
        let together = group[0].0;
        let pages = group.iter().enumerate().map(|(position, (_, page, detail))| match together {
            Together::Frame { .. } => (*page, *detail as usize),
            // Only those that are asked for are read.
            Together::Keyed { .. } => (*page, position),
        });
        let seals = group.iter().map(|(_, _, detail)| *detail).collect();
        Group { together, pages: pages.collect(), seals }
    });
    Ok(groups.collect())
}

/// With what a page is read; `None` for zeros.
pub(crate) fn read_with(
    entries: &[Entry],
    page: PageNumber,
) -> Result<Option<Together>, CheckpointError> {
    Ok(place(entries, page)?.map(|(together, _)| together))
}

/// With what a page is read, and its index in the frame, or its seal.
fn place(entries: &[Entry], page: PageNumber) -> Result<Option<(Together, u64)>, CheckpointError> {
    match entries[page.index()].place() {
        Ok(Place::Zeros) => Ok(None),
        Ok(Place::Packed(at)) => {
            let together = Together::Frame { segment: at.segment, frame: at.frame };
            Ok(Some((together, u64::from(at.index))))
        }
        Ok(Place::Keyed(at)) => {
            let stretch = page.0 / KEYED_TOGETHER;
            Ok(Some((Together::Keyed { source: at.source, stretch }, at.seal)))
        }
        Err(entry) => Err(CheckpointError::Image(ImageError::Damaged {
            place: format!("page {page}"),
            problem: format!("its entry {:#x} is unknown", entry.0),
        })),
    }
}

impl Group {
    /// Reads what holds the pages.
    pub(crate) fn read<'c>(
        &self,
        image: &ImageReader,
        cache: &'c mut FrameCache,
    ) -> Result<&'c [u8], ImageError> {
        match self.together {
            Together::Frame { segment, frame } => {
                let at = PageAddress { segment, frame, index: 0 };
                image.frame(self.pages[0].0, at, cache)
            }
            Together::Keyed { source, .. } => {
                let pages = self.pages.iter().zip(&self.seals);
                let pages: Vec<_> = pages.map(|((page, _), seal)| (*page, *seal)).collect();
                image.keyed(source, &pages, cache)
            }
        }
    }

    /// Says that its neighbours will be wanted soon.
    pub(crate) fn read_ahead(&self, image: &ImageReader) {
        if let Together::Frame { segment, .. } = self.together {
            image.read_ahead(segment);
        }
    }

    /// Its dirty store and the key there, where it is in one.
    pub(crate) fn part(&self) -> Option<(u32, u64)> {
        self.together.part()
    }

    /// Its dirty store, where it is in one.
    pub(crate) fn source(&self) -> Option<u32> {
        match self.together {
            Together::Keyed { source, .. } => Some(source),
            Together::Frame { .. } => None,
        }
    }

    pub(crate) fn runs(&self) -> impl Iterator<Item = Run<'_>> {
        self.pages.chunk_by(|a, b| a.0.0 + 1 == b.0.0).map(Run)
    }
}

impl Run<'_> {
    pub(crate) fn first(&self) -> PageNumber {
        self.0[0].0
    }

    /// The run's bytes, out of what was read.
    pub(crate) fn gather(&self, read: &[u8]) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = Vec::with_capacity(self.0.len() * PAGE_BYTES);
        for (page, index) in self.0 {
            let start = *index * PAGE_BYTES;
            let content = read.get(start..start + PAGE_BYTES).ok_or_else(|| {
                CheckpointError::Image(ImageError::Damaged {
                    place: format!("page {page}"),
                    problem: "its frame holds fewer pages".to_owned(),
                })
            })?;
            bytes.extend_from_slice(content);
        }
        Ok(bytes)
    }
}
