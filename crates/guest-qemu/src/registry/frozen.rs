//! What is known of a guest that has no process, or none that it is known to run in.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Where a guest is that has no process, and until it is known to run again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// Whether it ran.
    pub was_running: bool,
    /// The machine type with its version.
    pub machine: String,
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
    },
    /// As a checkpoint; its RAM files are gone.
    InStore {
        /// The store, by its URL.
        store: String,
        /// The image.
        image: String,
    },
}
