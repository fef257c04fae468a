//! Comparing memory with the parent image, where it is not known what was
//! written since.

use crate::CheckpointError;
use crate::frames::grouped;
use dewar_image::{Entry, FrameCache, ImageReader, ImageWriter};
use dewar_memory::Ram;
use dewar_units::{PAGE_BYTES, PageNumber};
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// One thread's comparison.
pub(crate) struct Compared<'w, 's> {
    writer: &'w ImageWriter<'s>,
    /// The parent, its entries, and working memory to read it; nothing where
    /// nothing is compared.
    parent: Option<(&'s ImageReader, &'w [Entry], FrameCache)>,
    /// Dirty stores that did not answer, to any of those who compare: asking each time
    /// would take for ever.
    away: &'w Mutex<HashSet<u32>>,
    bytes: Vec<u8>,
}

impl<'w, 's> Compared<'w, 's> {
    /// Compares with the writer's parent, if `compare` and it has one.
    pub(crate) fn new(
        writer: &'w ImageWriter<'s>,
        compare: bool,
        away: &'w Mutex<HashSet<u32>>,
    ) -> Result<Self, CheckpointError> {
        let parent = match writer.parent().filter(|_| compare) {
            Some((image, entries)) => Some((image, entries, FrameCache::new()?)),
            None => None,
        };
        Ok(Self { writer, parent, away, bytes: vec![0; PAGE_BYTES] })
    }

    /// Those of `pages` that differ from the parent; the others are kept from
    /// it. One that cannot be read there differs.
    pub(crate) fn differing(
        &mut self,
        ram: &Ram,
        pages: &[PageNumber],
    ) -> Result<Vec<PageNumber>, CheckpointError> {
        let Some((image, entries, cache)) = &mut self.parent else { return Ok(pages.to_vec()) };
        let away = || self.away.lock().unwrap_or_else(PoisonError::into_inner);
        let mut differing = Vec::new();
        let is_zero = |page: &PageNumber| entries[page.index()] == Entry::ZERO;
        differing.extend(pages.iter().copied().filter(is_zero));
        for group in grouped(entries, pages.iter().copied())? {
            group.read_ahead(image);
            let is_away = group.source().is_some_and(|source| away().contains(&source));
            let frame = match is_away {
                true => &[],
                false => group.read(image, cache).unwrap_or_else(|why| {
                    let source = group.source().filter(|_| why.is_server_failure());
                    away().extend(source);
                    &[]
                }),
            };
            for (page, index) in &group.pages {
                let start = *index * PAGE_BYTES;
                ram.copy_page(*page, &mut self.bytes);
                if frame.get(start..start + PAGE_BYTES) == Some(&self.bytes[..]) {
                    self.writer.keep(*page);
                } else {
                    differing.push(*page);
                }
            }
        }
        Ok(differing)
    }
}
