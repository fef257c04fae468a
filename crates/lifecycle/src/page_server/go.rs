//! The message that tells a page server which QEMU it serves.

use dewar_registry::ProcessId;
use serde::{Deserialize, Serialize};

/// The word to begin.
#[derive(Debug, Serialize, Deserialize)]
pub struct Go {
    /// The guest's.
    pub process: ProcessId,
    /// The number under which that has `/dev/userfaultfd`, where it needs it.
    pub device: Option<i32>,
}
