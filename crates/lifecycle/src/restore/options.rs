//! What a restore is asked for, and what came of it.

use crate::clock::Clock;
use crate::failure::Failure;
use crate::locked_guest::NextGuest;
use dewar_guest_qemu::RunState;
use dewar_image::Record;
use dewar_registry::GuestRecord;
use serde_json::Value;
use std::path::PathBuf;
use std::time::Instant;

/// How a guest shall be brought back.
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// A name for it; without one it has the one that it had.
    pub name: Option<String>,
    /// Whether a copy's network cards get new addresses.
    pub new_identity: bool,
    /// Whether all memory is there before it runs.
    pub eager: bool,
    /// Whether it is left paused.
    pub paused: bool,
    /// Whether it runs also where it was paused when it was saved.
    pub run: bool,
    /// Whether its clock goes on from when it was saved.
    pub keep_clock: bool,
    /// Whether the guest that has the name is ended for it.
    pub replace: bool,
    /// Whether it is started also where its memory does not fit.
    pub overcommit: bool,
    /// The folder for its RAM, where it is not the usual one.
    pub ram_dir: Option<PathBuf>,
    /// Whether it is the guest that is frozen under that name: until it runs, it stays so.
    pub next: NextGuest,
}

impl RestoreOptions {
    /// Whether a frozen guest is thawed.
    pub(super) fn is_thaw(&self) -> bool {
        self.next == NextGuest::Thawed
    }
}

/// A guest that was brought back.
#[derive(Debug)]
pub struct Restored {
    /// The checkpoint's record.
    pub checkpoint: Record,
    /// The guest's.
    pub record: GuestRecord,
    /// How it stands.
    pub state: RunState,
    /// How many pages the dead guest's RAM still had, where it is known.
    pub reused: Option<u64>,
    /// What QEMU said against ports that a frozen guest forwarded.
    pub unforwarded: Vec<String>,
    /// Its clock, if it runs.
    pub clock: Option<Clock>,
    /// When it was back.
    pub back_at: Instant,
    /// For programs: the new address of each old one.
    pub new_addresses: Value,
    /// Whether a copy has its new addresses.
    pub identified: Result<(), Failure>,
}
