//! Pages grouped by the frame that holds them, so that each frame is expanded
//! once.

use crate::CheckpointError;
use dewar_image::{Entry, ImageError, PageAddress};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};

/// Pages that lie in one frame, in the order of their numbers.
pub(crate) struct FrameGroup {
    /// The frame; its `index` means nothing.
    pub at: PageAddress,
    /// Each page, and where in the frame it lies.
    pub pages: Vec<(PageNumber, u8)>,
}

/// Neighbouring pages of one frame.
pub(crate) struct Run<'g>(&'g [(PageNumber, u8)]);

/// Groups those of `pages` that are not zeros.
pub(crate) fn by_frame(
    entries: &[Entry],
    pages: impl Iterator<Item = PageNumber>,
) -> Result<Vec<FrameGroup>, CheckpointError> {
    let mut found = Vec::new();
    for page in pages {
        if let Some(at) = address(entries, page)? {
            found.push(((at.segment, at.frame), page, at.index));
        }
    }
    found.sort_unstable();
    let groups = found.chunk_by(|a, b| a.0 == b.0).map(|group| {
        let (segment, frame) = group[0].0;
        let pages = group.iter().map(|(_, page, index)| (*page, *index)).collect();
        FrameGroup { at: PageAddress { segment, frame, index: 0 }, pages }
    });
    Ok(groups.collect())
}

/// Where a page lies; `None` for zeros.
pub(crate) fn address(
    entries: &[Entry],
    page: PageNumber,
) -> Result<Option<PageAddress>, CheckpointError> {
    entries[page.index()].address().map_err(|entry| {
        CheckpointError::Image(ImageError::Damaged {
            place: format!("page {page}"),
            problem: format!("its entry {:#x} is unknown", entry.0),
        })
    })
}

impl FrameGroup {
    pub(crate) fn runs(&self) -> impl Iterator<Item = Run<'_>> {
        self.pages.chunk_by(|a, b| a.0.0 + 1 == b.0.0).map(Run)
    }
}

impl Run<'_> {
    pub(crate) fn first(&self) -> PageNumber {
        self.0[0].0
    }

    pub(crate) fn range(&self) -> PageRange {
        let first = self.first().0;
        PageRange::new(first, first + self.0.len() as u64)
    }

    /// The run's bytes, out of its frame.
    pub(crate) fn gather(&self, frame: &[u8]) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = Vec::with_capacity(self.0.len() * PAGE_BYTES);
        for (page, index) in self.0 {
            let start = usize::from(*index) * PAGE_BYTES;
            let content = frame.get(start..start + PAGE_BYTES).ok_or_else(|| {
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
