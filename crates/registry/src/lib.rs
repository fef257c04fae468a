//! What Dewar knows of its guests: a folder each under the root.
//!
//! ```text
//! ROOT/guests/NAME/guest.json    the guest's record
//!                 /journal.json  what to undo, while something is under way
//!                 /lock          held by the command that works on the guest
//!                 /qmp.sock      Dewar's QMP socket
//!                 /console.log   what QEMU prints
//!                 /thawing       there while a frozen guest gets its next QEMU
//!                 /disk-N.qcow2  overlays of a restored guest
//! ROOT/migrations/SESSION.json   which host has a guest that moves
//! ROOT/store/                    the default store
//! ```
#![forbid(unsafe_code)]

mod disks;
mod error;
mod folder;
mod frozen;
mod host_lock;
mod json_file;
mod migrations;
mod process;
mod ram_file;
mod record;
mod registry;

pub use error::{RegistryError, io_error};
pub use folder::{GuestFolder, GuestLock};
pub use frozen::{
    Forward, Frozen, Kept, KeptDisk, NetworkBackend, STATE_FILE, SUMS_FILE, THAWING_FILE,
};
pub use host_lock::HostLock;
pub use migrations::Migrations;
pub use process::ProcessId;
pub use ram_file::remove_ram_file;
pub use record::{ContainerRecord, Descriptors, Engine, GuestRecord, Origin, Phase, RamFile};
pub use registry::{RAM_PREFIX, Registry};
