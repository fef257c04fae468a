//! Who is writing: an object in `writers/` that names, before they are made,
//! all objects of an image that does not exist yet.
//!
//! Its writer holds it. When the writer dies nobody does, and whoever finds
//! such a lease removes the objects that it names (unless the image's record
//! exists: then only the lease is left over). A lease may also name pages in a
//! dirty store; while that cannot be reached the lease stays.

use crate::backend::{Backend, Held, Hold, Holding};
use crate::{ImageError, ImageId, dirty};
use std::collections::HashSet;

pub(crate) const FOLDER: &str = "writers";
const SUFFIX: &str = ".lease";

/// A lease that we hold.
#[derive(Debug)]
pub(crate) struct WriterLease {
    held: Box<dyn Held>,
    name: String,
}

impl WriterLease {
    pub(crate) fn take(backend: &dyn Backend, id: &ImageId) -> Result<Self, ImageError> {
        let name = format!("{FOLDER}/{id}{SUFFIX}");
        match backend.hold(&name, Hold::New)? {
            Holding::Held(held) => Ok(Self { held, name }),
            Holding::Taken | Holding::Missing => Err(ImageError::InUse { id: id.0.clone() }),
        }
    }

    /// Notes objects that are about to be made.
    pub(crate) fn note(&mut self, names: &[String]) -> Result<(), ImageError> {
        let text: String = names.iter().flat_map(|name| [name.as_str(), "\n"]).collect();
        self.held.append(&text)
    }

    /// Puts what makes the image exist, unless the lease was lost.
    pub(crate) fn commit(&mut self, name: &str, record: &[u8]) -> Result<(), ImageError> {
        self.held.put(name, record)
    }

    /// The image exists now: its objects are no longer ours.
    pub(crate) fn release(self) -> Result<(), ImageError> {
        self.held.remove()
    }

    /// The image will not exist: removes its objects.
    pub(crate) fn abandon(self, backend: &dyn Backend) -> Result<(), ImageError> {
        match remove_named(backend, &self.name)? {
            Left::Nothing => self.held.remove(),
            Left::InDirtyStore => Ok(()),
        }
    }
}

/// Removes what dead writers left. `exists` tells whether an image does.
pub(crate) fn sweep(
    backend: &dyn Backend,
    exists: impl Fn(&ImageId) -> Result<bool, ImageError>,
) -> Result<(), ImageError> {
    for (object, _) in backend.list(FOLDER)? {
        let Some(id) = object.strip_suffix(SUFFIX) else { continue };
        let name = format!("{FOLDER}/{object}");
        let Holding::Held(held) = backend.hold(&name, Hold::Alone)? else { continue };
        let is_left_over = !exists(&ImageId(id.to_owned()))?;
        if is_left_over && matches!(remove_named(backend, &name)?, Left::InDirtyStore) {
            continue;
        }
        held.remove()?;
    }
    Ok(())
}

/// The objects that leases name.
pub(crate) fn named(backend: &dyn Backend) -> Result<HashSet<String>, ImageError> {
    let mut names = HashSet::new();
    for (object, _) in backend.list(FOLDER)? {
        // Without it: its image is there now, or given up.
        let text = backend.get(&format!("{FOLDER}/{object}"))?.unwrap_or_default();
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

fn remove_named(backend: &dyn Backend, lease: &str) -> Result<Left, ImageError> {
    let text = backend.get(lease)?.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    // A line without its end was being written: its object was not made yet.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for name in whole.lines().filter(|name| is_inside(name)) {
        backend.remove(name)?;
    }
    for (owner, url) in whole.lines().filter_map(dirty::parse_lease_line) {
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
