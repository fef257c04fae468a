//! What to undo: written before a guest is touched, removed when it is as it
//! was. If the command dies, the guardian or the next command undoes it.

use dewar_registry::{GuestFolder, KeptDisk, RegistryError};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

const FILE: &str = "journal.json";

/// How a guest was before we touched it, and what we put beside its disks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    /// Whether its vCPUs ran.
    pub was_running: bool,
    /// Whether we began to stop it and to change its settings, so that a guest which
    /// is found paused, migrating, or with other settings has that from us. Before, it
    /// is its user's doing.
    #[serde(default = "yes")]
    pub stopping: bool,
    /// Migration capabilities that we change, with their values before.
    pub capabilities: Vec<(String, bool)>,
    /// The migration's TLS credentials, where they were set.
    pub tls_creds: Option<String>,
    /// The most bytes a second that a migration was to send, where it had a limit.
    #[serde(default)]
    pub bandwidth: Option<u64>,
    /// Whether it stands still because we hold it, and is to be let run.
    #[serde(default)]
    pub held: bool,
    /// Its writable disks.
    pub disks: Vec<JournaledDisk>,
    /// How many of its disks are being copied to another host.
    #[serde(default)]
    pub mirrors: usize,
}

/// A disk whose writes go, or may go, to an overlay for a while.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournaledDisk {
    /// The block node of the guest's own disk.
    pub node: String,
    /// The node at the top, where there are filters between that and the disk: QEMU commits
    /// only what it is asked for by the name of such a one (`qmp_get_root_bs` in its
    /// block/qapi.c).
    #[serde(default)]
    pub top: Option<String>,
    /// The overlay's file.
    pub overlay: PathBuf,
    /// Which file is current if QEMU is gone.
    pub current: Current,
    /// The guest's own file as it was when the overlay had taken its place, while nothing
    /// of the overlay was written back.
    #[serde(default)]
    pub kept: Option<KeptDisk>,
}

/// Which file holds a disk's newest content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Current {
    /// The overlay, if it was ever used; the guest's own file under it.
    Overlay,
    /// The guest's own file: all of the overlay was written back.
    Own,
}

/// What a journal of before this was noted says.
fn yes() -> bool {
    true
}

impl Journal {
    /// The journal of a guest, if something is under way.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn load(folder: &GuestFolder) -> Result<Option<Self>, RegistryError> {
        folder.read(FILE)
    }

    /// Writes it to disk.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn save(&self, folder: &GuestFolder) -> Result<(), RegistryError> {
        folder.write(FILE, self)
    }

    /// Says that the guest is as it was.
    ///
    /// # Errors
    /// Where the file cannot be removed.
    pub fn close(folder: &GuestFolder) -> Result<(), RegistryError> {
        folder.remove(FILE)
    }
}
