//! The part of an image that lies one by one in a dirty store.

use super::ImageWriter;
use crate::dirty::{self, DirtyStore, KeyedPages, KeyedSink};
use crate::{Entry, ImageError, KeyedSource, Place, StoreError};
use dewar_units::PageNumber;
use std::collections::BTreeMap;

impl<'s> ImageWriter<'s> {
    /// Lets pages be put one by one into a dirty store ([`ImageWriter::keyed_sink`]).
    ///
    /// # Errors
    /// Where one of the stores cannot be written.
    pub fn use_dirty_store(&mut self, store: DirtyStore) -> Result<(), ImageError> {
        let pages = KeyedPages::new(store, &self.store.id(), &self.id);
        self.lock().note(&[dirty::lease_line(&pages.source(&self.id), &self.store.id())])?;
        pages.begin(self.options.pages)?;
        let known = self.parent.as_ref().map(|(parent, _)| &parent.record().keyed);
        // One that no entry of the parent names.
        let is_free = |number: &u32| known.is_none_or(|known| !known.contains_key(number));
        self.keyed = (0..).find(is_free).map(|source| (pages, source));
        Ok(())
    }

    /// A way into the dirty store for one thread, where there is one.
    ///
    /// # Errors
    /// Where the codec cannot be set up.
    pub fn keyed_sink(&self) -> Result<Option<KeyedSink<'_, 's>>, ImageError> {
        let keyed = self.keyed.as_ref();
        keyed.map(|(pages, source)| KeyedSink::new(self, pages, *source)).transpose()
    }

    pub(crate) fn note_keyed(&self, pages: &[PageNumber]) {
        let mut shared = self.lock();
        for page in pages {
            shared.keyed.insert(*page);
        }
    }

    /// Gives back what the dirty store holds of pages that were put elsewhere
    /// since.
    pub(super) fn forget_replaced(&self, entries: &[Entry]) -> Result<(), StoreError> {
        let Some((pages, source)) = &self.keyed else { return Ok(()) };
        let put = self.lock().keyed.clone();
        let is_needed = |page: &PageNumber| matches!(entries[page.index()].place(), Ok(Place::Keyed(at)) if at.source == *source);
        let (needed, replaced): (Vec<_>, Vec<_>) = put.iter().partition(is_needed);
        match needed.is_empty() {
            true => pages.remove_all(),
            false => pages.forget(&replaced),
        }
    }

    /// That all pages are there to which the page table leads in dirty stores: a server that
    /// came back without what it had taken says nothing of it. One that is away, and has only
    /// what an earlier image put there, is not waited for.
    pub(super) fn require_keyed(&self) -> Result<(), ImageError> {
        for (number, source) in self.sources() {
            let needed = self.lock().sources.get(&number).cloned().unwrap_or_default();
            if let Some((pages, _)) = self.keyed.as_ref().filter(|(_, own)| *own == number) {
                // The server also knows now that it has them, for the command that removes them.
                pages.begin(self.options.pages)?;
                pages.require(&needed)?;
                continue;
            }
            if let Some(why) = dirty::first_lost(&source, &self.store.id(), &needed) {
                return Err(ImageError::damaged(
                    why,
                    "the store has lost it since an earlier checkpoint put it there",
                ));
            }
        }
        Ok(())
    }

    /// The sources that the page table leads to.
    pub(super) fn sources(&self) -> BTreeMap<u32, KeyedSource> {
        let mut sources = BTreeMap::new();
        for number in self.lock().sources.keys() {
            let own = self.keyed.as_ref().filter(|(_, own)| own == number);
            let parent = self.parent.as_ref().map(|(parent, _)| &parent.record().keyed);
            let known = own
                .map(|(pages, _)| pages.source(&self.id))
                .or_else(|| parent?.get(number).cloned());
            sources.extend(known.map(|source| (*number, source)));
        }
        sources
    }
}
