//! Removing an image, and what only it needs.

use super::Store;
use crate::lease::{self, WriterLease};
use crate::{ImageError, ImageId, KeyedSource, dirty};
use dewar_store::{Lock, LockKind};
use std::collections::BTreeSet;

impl Store {
    /// Removes an image: its record first, so that from then on it does not
    /// exist, then its objects, except for those that other images share.
    ///
    /// No image can begin to share one of them meanwhile: its writer would hold the
    /// record of an image that has it. Two deletions at once might each leave a segment
    /// to the other; so only one goes on at a time.
    ///
    /// # Errors
    /// Where it is being read, another image's record cannot be, its own is not what it
    /// should be (but for broken bytes), the store cannot be written, or a dirty store that
    /// it alone has pages in does not answer; then it is still there.
    pub fn delete(&self, id: &ImageId) -> Result<Deleted, ImageError> {
        self.begin_deletion(id)?.finish(false)
    }

    /// Sees to it that nobody reads an image or deletes another until the deletion is
    /// finished or dropped. A reader that could need the image has it open from before.
    ///
    /// # Errors
    /// Where it is missing or being read.
    pub fn begin_deletion(&self, id: &ImageId) -> Result<Deletion<'_>, ImageError> {
        let one_at_a_time = self.lock_deletions()?;
        let lock = self.lock_record(id, LockKind::Alone)?;
        Ok(Deletion { store: self, id: id.clone(), lock, _one_at_a_time: one_at_a_time })
    }

    fn delete_locked(
        &self,
        id: &ImageId,
        lock: Box<dyn Lock>,
        only_here: bool,
    ) -> Result<Deleted, ImageError> {
        let record = match self.record(id) {
            Err(ImageError::BrokenRecord { .. }) => {
                lock.remove()?;
                self.backend.sync_folder("images")?;
                return Ok(Deleted::Record);
            }
            readable => readable?,
        };
        let mut doomed: BTreeSet<String> = self.objects(&record).collect();
        let mut doomed_pages: BTreeSet<&KeyedSource> = match only_here {
            true => BTreeSet::new(),
            false => record.keyed.values().collect(),
        };
        for other in self.each_record()?.iter().filter(|other| other.id != *id) {
            for object in self.objects(other) {
                doomed.remove(&object);
            }
            // One server may be known by several URLs.
            for source in other.keyed.values() {
                doomed_pages.retain(|doomed| doomed.image != source.image);
            }
        }
        for source in &doomed_pages {
            dirty::require(&source.store)?;
        }
        let pages = doomed_pages.iter().map(|source| dirty::lease_line(source, &self.id()));
        let names: Vec<String> = doomed.iter().cloned().chain(pages).collect();
        let lease = || -> Result<WriterLease, ImageError> {
            let mut lease = WriterLease::take(self.backend(), id)?;
            match lease.note(&names) {
                Ok(()) => Ok(lease),
                Err(why) => Ok(lease.release().and(Err(why))?),
            }
        };
        // Should we die in between, the sweep of the next writer goes on. A store that is
        // full has no room for the lease; the record gives it some.
        let noted = match lease() {
            Err(why) if why.is_for_want_of_room() => None,
            noted => Some(noted?),
        };
        // Not where our lock was lost: somebody may be reading it again.
        lock.remove()?;
        self.backend.sync_folder("images")?;
        match noted.map_or_else(lease, Ok) {
            Ok(lease) => lease.abandon(self)?,
            // Should we die now, the next collection finds that nobody needs them.
            Err(why) if why.is_for_want_of_room() => {
                // A number may have been given out twice: to a writer, or its record, of meanwhile.
                let mut needed = lease::named(self.backend())?;
                for record in self.each_record()? {
                    needed.extend(self.needs(&record));
                }
                let doomed = doomed.iter().filter(|name| !needed.contains(*name));
                doomed.into_iter().try_for_each(|name| self.backend.remove(name))?;
                for source in &doomed_pages {
                    dirty::remove(&source.store, &dirty::owner(&self.id(), &source.image))?;
                }
            }
            Err(why) => return Err(why),
        }
        Ok(Deleted::Whole)
    }
}

/// What was deleted of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    /// All that only it needed.
    Whole,
    /// Its record, which was damaged and told nothing of what it needed. That is left to
    /// [`crate::collect`].
    Record,
}

/// An image that is to be deleted, and is there still.
#[derive(Debug)]
pub struct Deletion<'s> {
    store: &'s Store,
    id: ImageId,
    lock: Box<dyn Lock>,
    _one_at_a_time: Box<dyn Lock>,
}

impl Deletion<'_> {
    /// Deletes it. With `only_here` pages in dirty stores stay where they are, for a store
    /// that is gone for good; [`crate::collect`] frees them while another image names
    /// that store.
    ///
    /// # Errors
    /// As [`Store::delete`].
    pub fn finish(self, only_here: bool) -> Result<Deleted, ImageError> {
        self.store.delete_locked(&self.id, self.lock, only_here)
    }
}
