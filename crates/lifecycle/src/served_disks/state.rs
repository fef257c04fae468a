//! How the disks that are served fare: what their processes write down, and `inspect` shows.

use dewar_registry::GuestFolder;
use serde::{Deserialize, Serialize};

const SERVER: &str = "served-disks-state.json";
const RESET: &str = "last-reset.json";

/// What a server says of its disks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ServedState {
    /// Disk by disk.
    pub disks: Vec<DiskState>,
    /// The last search of memory from before a reboot.
    pub search: Option<SearchState>,
    /// Why what was kept was given up, where it was.
    pub released: Option<String>,
}

/// Blocks of a disk, of 4 KiB, since its server began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskState {
    /// The block node.
    pub id: String,
    /// Read from the memory before a reboot.
    pub from_memory: u64,
    /// Read from the disk.
    pub from_disk: u64,
    /// Kept pages that were found altered when they were to be used: the disk was read in their place.
    pub wrong: u64,
    /// Of which is known what they hold.
    pub known: u64,
    /// Kept, and not read yet.
    pub kept: u64,
}

/// A search of memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SearchState {
    /// After which of the guest's resets ([`LastReset::held`]).
    pub reset: u64,
    /// Blocks of which was known what they hold.
    pub known: u64,
    /// Pages that were looked at.
    pub pages: u64,
    /// Pages that were kept.
    pub kept: u64,
    /// Pages that looked like a block's and were none.
    pub refused: u64,
    /// Pages for which there was no room.
    pub too_many: u64,
    /// How long it took, in milliseconds.
    pub took_ms: f64,
}

/// The guest's last reset.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LastReset {
    /// How many the supervisor has held.
    pub held: u64,
    /// How long the last one was held before QEMU reset it, in milliseconds.
    pub held_ms: f64,
    /// Why its memory was not set aside, where it was not.
    pub cold: Option<String>,
    /// Why its memory was copied while it was held, where it could not be exchanged.
    #[serde(default)]
    pub copied: Option<String>,
}

impl ServedState {
    /// What the server of a guest last said.
    pub fn of(folder: &GuestFolder) -> Option<Self> {
        folder.read(SERVER).ok().flatten()
    }

    /// Notes it; where it cannot be written, the next one will be.
    pub(super) fn save(&self, folder: &GuestFolder) {
        let _ = folder.write_for_now(SERVER, self);
    }
}

impl LastReset {
    /// What the supervisor of a guest last said.
    pub fn of(folder: &GuestFolder) -> Option<Self> {
        folder.read(RESET).ok().flatten()
    }

    pub(super) fn save(&self, folder: &GuestFolder) {
        let _ = folder.write_for_now(RESET, self);
    }
}
