//! What differs between two images.

use crate::{Entry, FrameCache, ImageError, ImageReader, PageAddress};
use dewar_units::{PageNumber, PageSet};

/// The pages whose content differs. Pages that lie in the same place are the
/// same and are not read.
///
/// # Errors
/// Where the images have different numbers of pages, or cannot be read.
pub fn diff(a: &ImageReader, b: &ImageReader) -> Result<PageSet, ImageError> {
    let (ours, theirs) = (a.entries()?, b.entries()?);
    if ours.len() != theirs.len() {
        return Err(ImageError::DifferentSizes {
            a: a.record().id.0.clone(),
            b: b.record().id.0.clone(),
        });
    }
    let mut elsewhere: Vec<(Option<PageAddress>, PageNumber)> = Vec::new();
    for (page, (our, their)) in ours.iter().zip(&theirs).enumerate() {
        let is_same_segment = |at: PageAddress| a.record().shares(at.segment, b.record());
        if our != their || !our.packed_at().is_none_or(is_same_segment) {
            elsewhere.push((our.packed_at(), PageNumber(page as u64)));
        }
    }
    // In the order of a's frames, so that each is expanded once.
    elsewhere.sort_unstable_by_key(|(at, page)| (at.map(|at| (at.segment, at.frame)), *page));
    let mut differing = PageSet::new(ours.len() as u64);
    let (mut cache_a, mut cache_b) = (FrameCache::new()?, FrameCache::new()?);
    for (_, page) in elsewhere {
        let entry = |entries: &[Entry]| entries[page.index()];
        let our = a.page(page, entry(&ours), &mut cache_a)?;
        let their = b.page(page, entry(&theirs), &mut cache_b)?;
        if our != their {
            differing.insert(page);
        }
    }
    Ok(differing)
}
