//! What is known of a guest that has no process, or none that it is known to run in.

use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where a guest is that has no process, and until it is known to run again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// Whether it ran.
    pub was_running: bool,
    /// The machine type with its version.
    pub machine: String,
    /// The ports that its user-mode networks forwarded; of a guest that an older version
    /// froze, those of its command line are.
    #[serde(default)]
    pub forwards: Option<Vec<Forward>>,
    /// When it was stopped, in milliseconds since 1970; not known of a guest that an older version froze.
    #[serde(default)]
    pub stopped_ms: Option<u64>,
    /// What else there is of it.
    pub kept: Kept,
}

/// How a frozen guest is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kept {
    /// Its RAM files are as they were; the state of its devices is in a file.
    InPlace {
        /// That file.
        state: PathBuf,
        /// The checksum of its bytes.
        sum: String,
        /// Whether the guest's folder has checksums of its RAM.
        sums: bool,
        /// Its writable disks that are files.
        #[serde(default)]
        disks: Vec<KeptDisk>,
    },
    /// As a checkpoint; its RAM files are gone.
    InStore {
        /// The store, by its URL.
        store: String,
        /// The image.
        image: String,
    },
    /// At the host that it comes from, until that gives it away.
    AtSource,
}

/// A port of the host that leads to one of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forward {
    /// Which backend of user-mode networking.
    pub backend: NetworkBackend,
    /// As QEMU's monitor takes it to forward the port (`hostfwd_add`).
    pub rule: String,
    /// As it takes it to stop that (`hostfwd_remove`).
    pub from: String,
}

/// A backend of user-mode networking, as it is known from one QEMU to the next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkBackend {
    /// By the name that its user gave it.
    Named(String),
    /// Which of those that QEMU named by itself, as they were made.
    Unnamed(usize),
}

/// A disk of a guest that has no process, and nobody's lock: the guest's memory knows it as
/// it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptDisk {
    /// Its file.
    pub path: PathBuf,
    // Not its device: a network share has another number each time that it is mounted.
    inode: u64,
    bytes: u64,
    /// When it was last written, in nanoseconds since 1970.
    modified_ns: i128,
}

impl KeptDisk {
    /// A disk as it is now; nothing where it is no regular file.
    pub fn of(path: &Path) -> Option<Self> {
        let data = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        Some(Self {
            path: path.to_owned(),
            inode: data.ino(),
            bytes: data.len(),
            modified_ns: i128::from(data.mtime()) * 1_000_000_000 + i128::from(data.mtime_nsec()),
        })
    }

    /// The same disk under another path.
    #[must_use]
    pub fn known_as(self, path: PathBuf) -> Self {
        Self { path, ..self }
    }

    /// Whether its path leads to the same file on this host, as far as its number in the file system tells.
    pub fn is_same_file(&self) -> bool {
        Self::of(&self.path).is_some_and(|here| here.inode == self.inode)
    }

    /// Whether nobody has written it since, or put another in its place.
    pub fn is_as_it_was(&self) -> bool {
        Self::of(&self.path).is_some_and(|now| now == *self)
    }
}

/// The checksums of a frozen guest's RAM, in its folder.
pub const SUMS_FILE: &str = "sums.json";
/// The device state of a frozen guest, among the names of the guest's own files.
pub const STATE_FILE: &str = ".state";
/// In its folder from before a thaw starts a QEMU until the guest runs in it.
pub const THAWING_FILE: &str = "thawing";
