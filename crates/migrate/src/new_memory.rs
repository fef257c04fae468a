//! The RAM files that arriving pages are written into.

use crate::MigrateError;
use crate::owed::OwedMemory;
use dewar_memory::NewRam;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use std::sync::{Arc, OnceLock};

/// New RAM files laid end to end, counted in pages as [`dewar_memory::Ram`] counts them.
#[derive(Debug, Default)]
pub struct NewMemory {
    regions: Vec<(PageRange, NewRam)>,
    /// From the moment on in which the guest may run: no other pages are taken then.
    owed: OnceLock<Arc<OwedMemory>>,
}

impl NewMemory {
    /// Adds a file of whole pages behind the others.
    pub fn add(&mut self, file: NewRam, pages: u64) {
        let first = self.pages();
        self.regions.push((PageRange::new(first, first + pages), file));
    }

    /// Memory that is in use and lacks pages.
    pub fn in_use(owed: Arc<OwedMemory>) -> Self {
        Self { regions: Vec::new(), owed: owed.into() }
    }

    /// Takes pages from now on only as ones that are owed.
    pub fn owes(&self, owed: &Arc<OwedMemory>) {
        let _ = self.owed.set(Arc::clone(owed));
    }

    /// How many pages there are in all.
    pub fn pages(&self) -> u64 {
        let in_files = self.regions.last().map_or(0, |(range, _)| range.end.0);
        self.owed.get().map_or(in_files, |owed| owed.pages())
    }

    /// Makes holes of pages.
    ///
    /// # Errors
    /// Where a file cannot be changed.
    pub fn clear(&self, pages: &PageSet) -> Result<(), MigrateError> {
        for (region, file) in &self.regions {
            for range in pages.ranges_in(*region) {
                let offset = (range.start.0 - region.start.0) * PAGE_BYTES as u64;
                file.clear(offset, range.count() * PAGE_BYTES as u64)?;
            }
        }
        Ok(())
    }

    /// Notes that pages are zeros, which were written before where `written` has them.
    ///
    /// # Errors
    /// Where there is no room.
    pub(crate) fn write_zeros(
        &self,
        range: PageRange,
        written: &mut PageSet,
    ) -> Result<(), MigrateError> {
        if let Some(owed) = self.owed.get() {
            return owed.place_zeros(range);
        }
        // A new file is zeros: only what was written before is overwritten.
        let overwritten: Vec<PageRange> = written.ranges_in(range).collect();
        for page in overwritten.iter().flat_map(PageRange::pages) {
            self.write(&[page], &[0; PAGE_BYTES])?;
            written.remove(page);
        }
        Ok(())
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
        if let Some(owed) = self.owed.get() {
            return owed.place(pages, bytes);
        }
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

    /// Reads a page that was written.
    ///
    /// # Errors
    /// Where the memory is in use, and another may write it; where it cannot be read.
    ///
    /// # Panics
    /// Where there is no such page.
    pub(crate) fn read(&self, page: PageNumber, into: &mut [u8]) -> Result<(), MigrateError> {
        self.refuse_in_use(page)?;
        let (region, file) = self.region_of(page);
        Ok(file.read_at(into, (page.0 - region.start.0) * PAGE_BYTES as u64)?)
    }

    /// Refuses to compare with a page, or to copy it, where the guest may have written it.
    pub(crate) fn refuse_in_use(&self, page: PageNumber) -> Result<(), MigrateError> {
        match self.owed.get() {
            None => Ok(()),
            Some(_) => Err(MigrateError::Refers(page)),
        }
    }

    fn region_of(&self, page: PageNumber) -> (&PageRange, &NewRam) {
        let found = self.regions.iter().find(|(range, _)| range.contains(page));
        let (range, file) = found.unwrap_or_else(|| panic!("page {page} of {}", self.pages()));
        (range, file)
    }
}
