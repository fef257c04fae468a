//! QEMU command lines: read just enough of one to change its RAM backend, and
//! to find its disks again.
//!
//! Everything that is not understood is passed on untouched.

mod exclusive_resources;
mod files;
mod heartbeats;
mod memory;
mod old_style;
mod options;
mod restore;
mod served_disks;
mod sockets;
mod truncated;

pub(crate) use exclusive_resources::ASIDE;
pub use exclusive_resources::{
    Holder, Later, Listening, Rename, TakeoverPlan, inherited, take_over,
};
pub(crate) use files::BOOTED;
pub use files::file_paths;
pub use heartbeats::{PORT_FILE, move_heartbeats, with_heartbeats};
pub use memory::{PlannedRegion, RunPlan, plan_run};
pub(crate) use options::Properties;
pub use options::{Argument, Unsupported, arguments};
pub use restore::{
    DiskPlace, RestorePlan, disk_places, plan_restore, with_other_disks, without_ram_paths,
};
pub(crate) use restore::{file_of, nested_filename, replace_disk};
pub use served_disks::{
    DISKS_SOCKET_FILE, LONGEST_DISK_ID, RESET_MONITOR_FILE, ServedNode, own_reset_option,
    served_nodes, with_served_disks, without_server,
};
pub use sockets::require_sockets;
pub(crate) use truncated::keep_truncated;
