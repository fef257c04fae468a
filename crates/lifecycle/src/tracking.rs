//! What a guest's next checkpoint can be taken on top of.
//!
//! After a checkpoint writes are tracked on, and `tracking.json` in the guest's
//! folder says from which image's pause. Before the next checkpoint touches the
//! guest it removes that file: if the checkpoint dies in between, no later one takes a part of the
//! written pages for all of them.

use crate::failure::Failure;
use dewar_image::{ImageError, ImageId, ImageReader, Record, RegionRecord, Store};
use dewar_memory::{KernelError, Pid, ProcessHandle, Ram, UffdOrigin, WriteTracker};
use dewar_registry::{GuestFolder, GuestRecord, ProcessId};
use dewar_units::{PageRange, PageSet};
use serde::{Deserialize, Serialize};

const FILE: &str = "tracking.json";

/// Who tracks a guest's writes, and since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracking {
    /// The QEMU that is tracked.
    pub process: ProcessId,
    /// The tracker's identity in it.
    pub tracker: u64,
    /// The image from whose pause on writes are tracked: its store's id, its
    /// own. Nothing where a checkpoint is under way or failed.
    pub since: Option<(String, ImageId)>,
    /// Pages that were written since then and that this tracker has not seen,
    /// as ranges: those of the process that the guest was in before.
    #[serde(default)]
    pub before: Vec<(u64, u64)>,
}

impl Tracking {
    /// What is tracked of the guest as it runs now.
    pub fn load(folder: &GuestFolder, record: &GuestRecord) -> Result<Option<Self>, Failure> {
        Ok(folder.read::<Self>(FILE)?.filter(|tracking| tracking.process.is_same(&record.process)))
    }

    /// Notes that a count is being touched: should we die, it is no count.
    pub fn invalidate(&self, folder: &GuestFolder) -> Result<(), Failure> {
        Self { since: None, before: Vec::new(), ..self.clone() }.save(folder)
    }

    /// The count that a new process's tracker goes on with.
    pub fn continued(&self, process: ProcessId, tracker: u64, before: &PageSet) -> Self {
        let before = before.ranges().map(|range| (range.start.0, range.end.0)).collect();
        Self { process, tracker, before, ..self.clone() }
    }

    /// The pages of [`Tracking::before`], of so many.
    pub fn pages_before(&self, pages: u64) -> PageSet {
        let mut set = PageSet::new(pages);
        let within = self.before.iter().filter(|(start, end)| start <= end && *end <= pages);
        within.for_each(|(start, end)| set.insert_range(PageRange::new(*start, *end)));
        set
    }

    /// Notes it, on disk.
    pub fn save(&self, folder: &GuestFolder) -> Result<(), Failure> {
        Ok(folder.write(FILE, self)?)
    }
}

/// Forgets what was tracked: the guest's memory is another.
pub fn forget(folder: &GuestFolder) -> Result<(), Failure> {
    Ok(folder.remove(FILE)?)
}

/// What was written in a process that has stopped for good, and before it, since
/// the image: nothing where that count was lost.
pub fn written_before(
    process: &ProcessHandle,
    ram: &Ram,
    tracking: &Tracking,
) -> Result<Option<PageSet>, KernelError> {
    let Some(tracker) = WriteTracker::resume(process, ram, tracking.tracker)? else {
        return Ok(None);
    };
    tracker.count_in(&tracking.pages_before(ram.pages()));
    tracker.look(1).map(Some)
}

/// Begins to track a process in which the guest has not run yet.
pub fn arm(process: &ProcessHandle, ram: &Ram, origin: UffdOrigin) -> Result<u64, KernelError> {
    let tracker = WriteTracker::attach(process, ram, origin, None)?;
    tracker.arm()?;
    tracker.identity()
}

/// A tracker's identity, and the pages that were written before it began.
pub type Known = (u64, PageSet);

/// Ends what is tracked in a guest that is left to itself.
pub fn end(folder: &GuestFolder, record: &GuestRecord, ram: &Ram) -> Option<()> {
    let tracking = Tracking::load(folder, record).ok()??;
    let process = ProcessHandle::open(Pid(record.process.pid)).ok()?;
    WriteTracker::resume(&process, ram, tracking.tracker).ok()??.end().ok()
}

/// The image to begin with: the one since which writes are tracked, or else
/// the newest of this guest, or else the one that it was restored from; the tracker's
/// identity comes with the first, and what it has not seen. None where no image has RAM of
/// the same layout; where the last one that has cannot be read, `unreadable` is told why.
pub fn base(
    store: &Store,
    guest: &GuestRecord,
    ram: &Ram,
    tracking: Option<&Tracking>,
    unreadable: impl FnOnce(ImageError),
) -> Result<Option<(ImageReader, Option<Known>)>, Failure> {
    let own_id = store.id();
    let tracked = tracking.and_then(|tracking| {
        let (_, image) = tracking.since.as_ref().filter(|(store, _)| *store == own_id)?;
        let known = (tracking.tracker, tracking.pages_before(ram.pages()));
        Some((open_whole(store, image).ok()?, known))
    });
    if let Some((image, known)) = tracked {
        if fits(image.record(), ram) {
            // What cannot be read there is stored anew where it is compared.
            let known = Some(known).filter(|_| !image.has_lost_pages());
            return Ok(Some((image, known)));
        }
    }
    let (records, _) = store.records()?;
    let newest = |is_one: &dyn Fn(&Record) -> bool| {
        records.iter().rev().find(|record| is_one(record) && fits(record, ram))
    };
    let origin = guest.origin.as_ref().map(|origin| origin.image.as_str());
    let base = newest(&|record| record.guest == guest.name)
        .or_else(|| newest(&|record| Some(record.id.0.as_str()) == origin));
    let Some(base) = base else { return Ok(None) };
    // One that cannot be opened is no base; the checkpoint is a full one then.
    let image = open_whole(store, &base.id).map_err(unreadable).ok();
    Ok(image.map(|image| (image, None)))
}

/// An image whose segments are those that were written for it: what stands on others must
/// not be inherited.
fn open_whole(store: &Store, id: &ImageId) -> Result<ImageReader, ImageError> {
    let image = store.open_image(id)?;
    image.require_segments()?;
    Ok(image)
}

fn fits(record: &Record, ram: &Ram) -> bool {
    let layout = ram
        .regions()
        .iter()
        .map(|region| RegionRecord { name: region.name.clone(), pages: region.pages.count() });
    layout.eq(record.memory.regions.iter().cloned())
}
