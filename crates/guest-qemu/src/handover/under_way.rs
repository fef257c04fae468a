//! A hand-over under way, as it is kept on disk.

use super::tap::TapHeader;
use crate::cmdline::{Later, Rename};
use crate::qmp::Qmp;
use dewar_registry::{Forward, GuestFolder, GuestRecord, ProcessId, RegistryError};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};

pub(super) const FILE: &str = "handover.json";
/// Dewar's socket of the new QEMU, until it has the guest.
pub(super) const SOCKET: &str = "qmp.sock~";

/// How far a hand-over has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stage {
    Starting,
    Moving,
    Moved,
}

/// A hand-over under way, as it is kept on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Handover {
    pub(super) stage: Stage,
    /// The QEMU that gives the guest up.
    pub(super) old: ProcessId,
    /// Dewar's socket of it, as long as it has the guest.
    pub(super) old_socket: PathBuf,
    /// The new QEMU, when it is known.
    pub(super) new: Option<ProcessId>,
    /// The guest's record from the hand-over on, but for its process.
    pub(super) next: GuestRecord,
    pub(super) was_running: bool,
    pub(super) renames: Vec<Rename>,
    pub(super) later: Vec<Later>,
    pub(super) forwards: Vec<Forward>,
    /// The old QEMU's taps, as they were.
    pub(super) taps: Vec<TapHeader>,
    /// The migration settings that users see: capabilities and parameters.
    pub(super) capabilities: Value,
    pub(super) parameters: Value,
}

impl Handover {
    pub(super) fn load(folder: &GuestFolder) -> Result<Option<Self>, RegistryError> {
        folder.read(FILE)
    }

    pub(super) fn save(&self, folder: &GuestFolder) -> Result<(), RegistryError> {
        folder.write(FILE, self)
    }

    pub(super) fn connect_old(&self) -> Option<Qmp> {
        Qmp::connect_to(&self.old_socket, &self.old).ok()
    }

    /// Connects to the new QEMU, under whichever name its socket has by now.
    pub(super) fn connect_new(&self, folder: &GuestFolder) -> Option<Qmp> {
        let new = self.new.as_ref()?;
        let connect = |socket: &Path| Qmp::connect_to(socket, new).ok();
        connect(&folder.file(SOCKET)).or_else(|| connect(&self.next.qmp))
    }
}

/// Whether a hand-over was begun and not finished.
pub fn is_under_way(folder: &GuestFolder) -> bool {
    folder.file(FILE).exists()
}

/// The processes that a hand-over under way may have the guest in, for somebody who ends
/// all of them.
pub fn processes(folder: &GuestFolder) -> Vec<ProcessId> {
    let handover = Handover::load(folder).ok().flatten();
    handover.map_or_else(Vec::new, |it| [Some(it.old), it.new].into_iter().flatten().collect())
}
