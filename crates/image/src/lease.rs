//! The lease of a writer: an object in `writers/` that names, before they are made,
//! all objects of an image that does not exist yet.
//!
//! The writer has its lease locked. When the writer dies the lock ends, and the next writer or
//! collection removes the objects that the lease names, except those that a record
//! or another lease names. There are such in two cases. The image's own record exists: its
//! writer died, or lost its connection, just after it made the record. Or a number was
//! given out twice, by a counter that is older than the segments: of a folder that
//! was copied while it was written to, of a server that came back without its last
//! seconds. A lease may also name pages in a dirty store; while that cannot be
//! reached the lease stays.

use crate::{ImageError, ImageId, Store, StoreError, dirty};
use dewar_store::{Backend, Lock, LockAttempt, LockKind};
use std::collections::HashSet;

pub(crate) const FOLDER: &str = "writers";
const SUFFIX: &str = ".lease";

/// A lease that this process has locked.
#[derive(Debug)]
pub(crate) struct WriterLease {
    held: Box<dyn Lock>,
    name: String,
}

impl WriterLease {
    pub(crate) fn take(backend: &dyn Backend, id: &ImageId) -> Result<Self, ImageError> {
        let name = format!("{FOLDER}/{id}{SUFFIX}");
        match backend.lock(&name, LockKind::New)? {
            LockAttempt::Locked(held) => Ok(Self { held, name }),
            LockAttempt::Taken | LockAttempt::Missing => {
                Err(ImageError::InUse { id: id.0.clone() })
            }
        }
    }

    /// Notes objects that are about to be made.
    pub(crate) fn note(&mut self, names: &[String]) -> Result<(), StoreError> {
        let text: String = names.iter().flat_map(|name| [name.as_str(), "\n"]).collect();
        self.held.append(&text)
    }

    /// Puts what makes the image exist, unless the lease was lost.
    pub(crate) fn commit(&mut self, name: &str, record: &[u8]) -> Result<(), StoreError> {
        self.held.put(name, record)
    }

    /// The image exists now: its objects are no longer ours.
    pub(crate) fn release(self) -> Result<(), StoreError> {
        self.held.remove()
    }

    /// The image will not exist: removes its objects.
    pub(crate) fn abandon(self, store: &Store) -> Result<(), ImageError> {
        match remove_named(store, &self.name)? {
            Left::Nothing => Ok(self.held.remove()?),
            Left::InDirtyStore => Ok(()),
        }
    }
}

/// Removes what dead writers left. With `only_here` nothing waits for a dirty store that
/// does not answer: what is there stays there.
pub(crate) fn sweep(store: &Store, only_here: bool) -> Result<(), ImageError> {
    for (object, _) in store.backend().list(FOLDER)? {
        if !object.ends_with(SUFFIX) {
            continue;
        }
        let name = format!("{FOLDER}/{object}");
        let LockAttempt::Locked(held) = store.backend().lock(&name, LockKind::Alone)? else {
            continue;
        };
        match remove_named(store, &name) {
            Ok(Left::Nothing) => held.remove()?,
            Ok(Left::InDirtyStore) if only_here => held.remove()?,
            // Of a record that cannot be read it is not known what it needs.
            Ok(Left::InDirtyStore)
            | Err(
                ImageError::BrokenRecord { .. }
                | ImageError::Damaged { .. }
                | ImageError::TooNew { .. },
            ) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

/// What leases name.
pub(crate) fn named(backend: &dyn Backend) -> Result<HashSet<String>, ImageError> {
    named_by(backend, |_| Ok(true))
}

/// What leases name that are locked.
pub(crate) fn named_by_the_living(backend: &dyn Backend) -> Result<HashSet<String>, ImageError> {
    named_by(backend, |lease| match backend.lock(lease, LockKind::Alone)? {
        LockAttempt::Locked(_) | LockAttempt::Missing => Ok(false),
        LockAttempt::Taken => Ok(true),
    })
}

/// What those leases name that `counts`.
fn named_by(
    backend: &dyn Backend,
    counts: impl Fn(&str) -> Result<bool, ImageError>,
) -> Result<HashSet<String>, ImageError> {
    let mut names = HashSet::new();
    for (object, _) in backend.list(FOLDER)? {
        let lease = format!("{FOLDER}/{object}");
        if !counts(&lease)? {
            continue;
        }
        // Without it: its image is there now, or given up.
        let text = backend.get(&lease)?.unwrap_or_default();
        names.extend(String::from_utf8_lossy(&text).lines().map(str::to_owned));
    }
    Ok(names)
}

/// What could not be removed.
enum Left {
    Nothing,
    /// Pages in a store that did not answer.
    InDirtyStore,
}

fn remove_named(store: &Store, lease: &str) -> Result<Left, ImageError> {
    let backend = store.backend();
    let text = backend.get(lease)?.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    // A line without its end was being written: its object was not made yet.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    if whole.is_empty() {
        return Ok(Left::Nothing);
    }
    // Leases before records: what was being written meanwhile is in one of them.
    let mut needed = named_by(backend, |other| Ok(other != lease))?;
    for record in store.each_record()? {
        needed.extend(store.needs(&record));
    }
    for name in whole.lines().filter(|name| is_inside(name) && !needed.contains(*name)) {
        backend.remove(name)?;
    }
    let pages = whole.lines().filter(|line| !needed.contains(*line));
    for (owner, url) in pages.filter_map(dirty::parse_lease_line) {
        if dirty::remove(url, owner).is_err() {
            return Ok(Left::InDirtyStore);
        }
    }
    Ok(Left::Nothing)
}

/// Whether a name stays inside the store.
fn is_inside(name: &str) -> bool {
    (name.starts_with("segments/") || name.starts_with("disks/")) && !name.contains("..")
}
