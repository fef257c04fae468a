//! What a guest's next checkpoint can be taken on top of.
//!
//! After a checkpoint writes are tracked on, and `tracking.json` in the guest's
//! folder says from which image's pause. Before the next one touches the
//! guest that is struck out: should it die in between, nobody takes its half
//! of the count for the whole.

use crate::failure::Failure;
use dewar_guest_qemu::registry::{GuestFolder, GuestRecord, ProcessId};
use dewar_image::{ImageId, ImageReader, Record, RegionRecord, Store};
use dewar_memory::Ram;
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
}

impl Tracking {
    /// What is tracked of the guest as it runs now.
    pub fn load(folder: &GuestFolder, record: &GuestRecord) -> Result<Option<Self>, Failure> {
        Ok(folder.read::<Self>(FILE)?.filter(|tracking| tracking.process == record.process))
    }

    /// Notes it, on disk.
    pub fn save(&self, folder: &GuestFolder) -> Result<(), Failure> {
        Ok(folder.write(FILE, self)?)
    }
}

/// The image to begin with: the one since which writes are tracked, or else
/// the newest of this guest; the tracker's identity comes with the first. None
/// where no image has RAM of the same layout.
pub fn base(
    store: &Store,
    guest: &str,
    ram: &Ram,
    tracking: Option<&Tracking>,
) -> Result<Option<(ImageReader, Option<u64>)>, Failure> {
    let own_id = store.id();
    let tracked = tracking.and_then(|tracking| {
        let (_, image) = tracking.since.as_ref().filter(|(store, _)| *store == own_id)?;
        Some((store.open_image(image).ok()?, tracking.tracker))
    });
    if let Some((image, tracker)) = tracked {
        if fits(image.record(), ram) {
            return Ok(Some((image, Some(tracker))));
        }
    }
    let (records, _) = store.records()?;
    let newest = records.iter().rev().find(|record| record.guest == guest && fits(record, ram));
    // One that cannot be opened is no base; the checkpoint is a full one then.
    Ok(newest.and_then(|record| Some((store.open_image(&record.id).ok()?, None))))
}

fn fits(record: &Record, ram: &Ram) -> bool {
    let layout = ram
        .regions()
        .iter()
        .map(|region| RegionRecord { name: region.name.clone(), pages: region.pages.count() });
    layout.eq(record.memory.regions.iter().cloned())
}
