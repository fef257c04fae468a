//! Freeing what no image needs.
//!
//! Deleting an image removes the segments and disk copies that no other record names.
//! What is left for the collector: objects that no record names (of a record that was
//! damaged, say), and segments of which other images need only some frames. These
//! segments are written anew under their own number with the same frame numbers,
//! the other frames *dropped*: they have no length. So no page table changes.
//!
//! **Beside writers.** Objects are listed before leases are read, and leases before
//! records: a segment or disk copy that is being written is named by a lease until
//! its image's record is there. What an image that is being written shares with others
//! these need too, and it keeps them from being deleted until its own record is there.
//!
//! Objects that only a dead writer's lease names are removed with the lease, at the end: the
//! collector takes that lease, and looks anew, since a number may be given out again
//! (the module `lease` tells when).
//!
//! **Dirty stores.** Of pages that lie there one by one, those of an image are
//! freed together, when no record and no living writer's lease names them.
//!
//! **Beside readers.** A segment is replaced in one step (rename); a reader that has the
//! old file open goes on reading it.
//!
//! **Killed.** Until the rename the old segment is in place; what was written
//! beside it is removed by the next collection.

use crate::segment::SegmentBuilder;
use crate::segment::segment_name;
use crate::{Entry, ImageError, ImageId, KeyedSource, Place, Store, dirty, lease};
use dewar_store::AlignedBytes;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet, HashSet};

const FOLDER: &str = "segments";
const DISKS: &str = "disks";

/// What a collection freed, or would free.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Segments that no image needs any more.
    pub segments_removed: u64,
    /// Segments of which at most half was needed.
    pub segments_compacted: u64,
    /// Disk copies that no image needs any more, by the objects that they lie in.
    pub disks_removed: u64,
    /// Images that are gone and had pages in a dirty store.
    pub dirty_removed: u64,
    /// Why the first segment was left as it is that could not be compacted.
    pub compact_problem: Option<String>,
    /// Why the first dirty store was left as it is that was.
    pub dirty_problem: Option<String>,
    /// Bytes that segments and disk copies gave back.
    pub bytes_freed: u64,
}

/// Frees what no image needs; with `dry_run` only says what it would.
/// `progress` is told before each step, as (done, of).
///
/// # Errors
/// Where an image's record or page table cannot be read: then it is not known
/// what it needs, and nothing is removed. A segment that cannot be compacted, and a dirty
/// store that is away, are told in what is returned.
pub fn collect(
    store: &Store,
    dry_run: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Collected, ImageError> {
    let _one_at_a_time = store.lock_deletions()?;
    if !dry_run {
        store.backend().tidy(FOLDER)?;
    }
    let existing = segments_in(store)?;
    let disks = store.backend().list(DISKS)?;
    let leased = lease::named_by_the_living(store.backend())?;
    let swept = lease::named(store.backend())?;
    let needed = Needed::of(store, progress)?;
    let mut collected = Collected::default();
    let images = needed.images;
    let steps = images + existing.len() as u64 + disks.len() as u64;
    let mut done = images..;
    let mut step = || progress(done.next().unwrap_or(steps), steps);
    // First what nobody needs: to write a segment anew takes room.
    let mut shared = Vec::new();
    for (number, bytes) in existing {
        let name = segment_name(number);
        if leased.contains(&name) || needed.named.contains(&number) {
            shared.push((number, bytes));
            continue;
        }
        step();
        collected.segments_removed += 1;
        collected.bytes_freed += bytes;
        if !dry_run && !swept.contains(&name) {
            store.backend().remove(&name)?;
        }
    }
    for (name, bytes) in disks {
        step();
        let object = format!("{DISKS}/{name}");
        let is_needed = leased.contains(&object) || needed.disks.contains(&object);
        if is_needed || !is_disk_copy(&name) {
            continue;
        }
        collected.disks_removed += 1;
        collected.bytes_freed += bytes;
        if !dry_run && !swept.contains(&object) {
            store.backend().remove(&object)?;
        }
    }
    for (number, bytes) in shared {
        step();
        if leased.contains(&segment_name(number)) {
            continue;
        }
        match compact(store, number, bytes, needed.frames.get(&number), dry_run) {
            Ok(None) => {}
            Ok(Some(freed)) => {
                collected.segments_compacted += 1;
                collected.bytes_freed += freed;
            }
            // It stays as it is. Where the store itself refuses, so do the others.
            Err(why) => {
                collected.compact_problem.get_or_insert(why.to_string());
                if why.is_server_failure() {
                    break;
                }
            }
        }
    }
    // What was freed is told also where a dirty store is away.
    (collected.dirty_removed, collected.dirty_problem) =
        collect_dirty(store, &needed.sources, dry_run)?;
    if !dry_run {
        store.sweep()?;
        store.backend().sync_folder(FOLDER)?;
        store.backend().sync_folder(DISKS)?;
    }
    Ok(collected)
}

/// Frees, in every dirty store that is known of, what no image needs.
///
/// A writer takes its lease before its first page is there and holds it until
/// its record is: so an image that is found there and has neither afterwards
/// will never have either. What a newer image shares is needed by one before.
/// One server may be known by several URLs: an image that is named with any of
/// them is left alone. Returns of how many images pages were removed, and why the first
/// store was left as it is that was.
fn collect_dirty(
    store: &Store,
    needed: &BTreeSet<KeyedSource>,
    dry_run: bool,
) -> Result<(u64, Option<String>), ImageError> {
    let known = lease::named(store.backend())?;
    let by_leases = known.iter().filter_map(|line| dirty::parse_lease_line(line));
    let by_records = needed.iter().map(|source| source.store.as_str());
    let urls: BTreeSet<&str> = by_records.chain(by_leases.map(|(_, url)| url)).collect();
    let (mut removed, mut problem) = (0, None);
    let mut left = |why: ImageError| {
        problem.get_or_insert(why.to_string());
    };
    for url in urls {
        let images = match dirty::images_in(url, &store.id()) {
            Ok(images) => images,
            Err(why) => {
                left(why);
                continue;
            }
        };
        let leases = lease::named_by_the_living(store.backend())?;
        let leased: HashSet<&str> =
            leases.iter().filter_map(|line| Some(dirty::parse_lease_line(line)?.0)).collect();
        for image in images {
            let owner = dirty::owner(&store.id(), &image);
            let is_needed = needed.iter().any(|source| source.image == image);
            if is_needed || leased.contains(owner.as_str()) || store.has_record(&image)? {
                continue;
            }
            let gone =
                if dry_run { Ok(()) } else { dirty::remove(url, &owner).map_err(ImageError::from) };
            removed += u64::from(gone.is_ok());
            gone.unwrap_or_else(&mut left);
        }
    }
    Ok((removed, problem))
}

/// What all images need.
#[derive(Default)]
struct Needed {
    /// Pages in dirty stores.
    sources: BTreeSet<KeyedSource>,
    /// Segments that a record names.
    named: FxHashSet<u64>,
    /// Objects that a disk copy lies in.
    disks: HashSet<String>,
    /// Frames that a page, a node or a blob lies in.
    frames: FxHashMap<u64, FrameSet>,
    /// How many images were read.
    images: u64,
}

impl Needed {
    fn of(store: &Store, progress: &mut dyn FnMut(u64, u64)) -> Result<Self, ImageError> {
        let mut needed = Self::default();
        let ids = store.ids()?;
        // Images share nodes: each is read once, so that a chain takes no longer than its
        // images each by itself.
        let mut seen = FxHashSet::default();
        needed.images = ids.len() as u64;
        for (done, id) in ids.iter().enumerate() {
            progress(done as u64, ids.len() as u64);
            let image = match store.open_image(id) {
                // Half deleted: it exists no more.
                Err(ImageError::NotFound { .. }) if !store.has_record(id)? => continue,
                other => other?,
            };
            let record = image.record();
            needed.named.extend(record.all_segments());
            needed.disks.extend(record.disks.iter().flat_map(|disk| store.disk_objects(disk)));
            needed.sources.extend(record.keyed.values().cloned());
            let mut unknown = None;
            image.visit_entries(&mut seen, &mut |level| needed.add(level, &mut unknown))?;
            let blobs = [&record.device_state, &record.hot_pages].into_iter();
            let blobs = blobs.chain(record.print_lists());
            blobs.for_each(|blob| needed.add(&blob.entries, &mut unknown));
            if let Some(Entry(entry)) = unknown {
                let problem = format!("entry {entry:#x} is unknown");
                return Err(ImageError::TooNew { place: format!("checkpoint {id}"), problem });
            }
        }
        Ok(needed)
    }

    /// Notes what entries lead to, or that it is not known of one.
    fn add(&mut self, entries: &[Entry], unknown: &mut Option<Entry>) {
        let mut last = None;
        for entry in entries {
            let at = match entry.place() {
                Ok(Place::Packed(at)) => at,
                Ok(Place::Zeros | Place::Keyed(_)) => continue,
                Err(entry) => {
                    *unknown = Some(entry);
                    continue;
                }
            };
            let place = (at.segment, at.frame);
            if last != Some(place) {
                self.frames.entry(at.segment).or_default().insert(at.frame);
                last = Some(place);
            }
        }
    }
}

/// Frames of a segment.
#[derive(Default)]
struct FrameSet(Vec<u64>);

impl FrameSet {
    fn insert(&mut self, frame: u16) {
        let word = usize::from(frame) / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (frame % 64);
    }

    fn contains(&self, frame: u16) -> bool {
        let word = self.0.get(usize::from(frame) / 64);
        word.is_some_and(|word| word & (1 << (frame % 64)) != 0)
    }
}

/// Drops the frames of a segment that are not `kept`, where they are more than
/// half of it. Returns the bytes that this frees.
fn compact(
    store: &Store,
    number: u64,
    bytes: u64,
    kept: Option<&FrameSet>,
    dry_run: bool,
) -> Result<Option<u64>, ImageError> {
    let segment = store.segment(number, None)?;
    let is_kept = |frame: u16| kept.is_some_and(|kept| kept.contains(frame));
    let kept_bytes: u64 =
        (0..segment.frames()).filter(|it| is_kept(*it)).map(|it| segment.frame_bytes(it)).sum();
    let all_bytes: u64 = (0..segment.frames()).map(|it| segment.frame_bytes(it)).sum();
    if all_bytes == 0 || kept_bytes * 2 > all_bytes {
        return Ok(None);
    }
    if dry_run {
        return Ok(Some(all_bytes - kept_bytes));
    }
    let memory = AlignedBytes::default();
    let mut builder = SegmentBuilder::new(store.raw_id(), number, segment.id(), memory);
    let mut buffer = Vec::new();
    for frame in 0..segment.frames() {
        if is_kept(frame) {
            // Checked: a damaged frame is not carried on as a good one.
            segment.read_frame(frame, &mut buffer)?;
            builder.append_stored(&buffer);
        } else {
            builder.append_stored(&[]);
        }
    }
    let (_, content) = builder.finish();
    store.backend().put(&segment_name(number), &content)?;
    Ok(Some(bytes.saturating_sub(content.len() as u64)))
}

/// Whether an object among the disk copies is one, and not something that somebody put
/// there: an image's id, and the disk's number.
fn is_disk_copy(name: &str) -> bool {
    let Some((image, rest)) = name.split_once('-') else { return false };
    let number = rest.split_once('.').map_or("", |(number, _)| number);
    ImageId::is_one(image) && number.parse::<usize>().is_ok()
}

/// The segments that there are, with their sizes.
fn segments_in(store: &Store) -> Result<BTreeMap<u64, u64>, ImageError> {
    let listed = store.backend().list(FOLDER)?;
    let number = |name: &str| u64::from_str_radix(name.strip_suffix(".seg")?, 16).ok();
    Ok(listed.iter().filter_map(|(name, bytes)| Some((number(name)?, *bytes))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_of_an_unknown_kind_may_need_anything() {
        let (mut needed, mut unknown) = (Needed::default(), None);
        needed.add(&[Entry::ZERO], &mut unknown);
        assert_eq!(unknown, None);
        let newer = Entry(3);
        needed.add(&[newer, Entry::ZERO], &mut unknown);
        assert_eq!(unknown, Some(newer));
    }
}
