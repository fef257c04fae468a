//! The RAM files that arriving pages are written into.

use crate::MigrateError;
use dewar_memory::NewRam;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};

/// New RAM files laid end to end, counted in pages as [`dewar_memory::Ram`] counts them.
#[derive(Debug, Default)]
pub struct NewMemory {
    regions: Vec<(PageRange, NewRam)>,
}

impl NewMemory {
    /// Adds a file of whole pages behind the others.
    pub fn add(&mut self, file: NewRam, pages: u64) {
        let first = self.pages();
        self.regions.push((PageRange::new(first, first + pages), file));
    }

    /// How many pages there are in all.
    pub fn pages(&self) -> u64 {
        self.regions.last().map_or(0, |(range, _)| range.end.0)
    }

    /// Writes pages, one after the other in `bytes`; those that lie together at once.
    ///
    /// # Errors
    /// Where there is no room.
    ///
    /// # Panics
    /// Where there is no such page, or `bytes` are not those of all pages.
    pub(crate) fn write(&self, pages: &[PageNumber], bytes: &[u8]) -> Result<(), MigrateError> {
        assert_eq!(bytes.len(), pages.len() * PAGE_BYTES);
        let mut from = 0;
        while from < pages.len() {
            let (region, file) = self.region_of(pages[from]);
            let lies_on = |index: &usize| {
                pages[*index].0 == pages[from].0 + (*index - from) as u64
                    && region.contains(pages[*index])
            };
            let end = (from + 1..pages.len()).take_while(lies_on).last().map_or(from, |it| it) + 1;
            let offset = (pages[from].0 - region.start.0) * PAGE_BYTES as u64;
            file.write_at(&bytes[from * PAGE_BYTES..end * PAGE_BYTES], offset)?;
            from = end;
        }
        Ok(())
    }

    fn region_of(&self, page: PageNumber) -> (&PageRange, &NewRam) {
        let found = self.regions.iter().find(|(range, _)| range.contains(page));
        let (range, file) = found.unwrap_or_else(|| panic!("page {page} of {}", self.pages()));
        (range, file)
    }
}
