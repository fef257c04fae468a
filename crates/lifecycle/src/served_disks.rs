//! Disks of a guest that Dewar serves to its QEMU, with a cache that outlives a reboot of the guest.
//!
//! Two processes of ours stand beside such a guest, and each starts the other again:
//!
//! ```text
//!            __disks, the supervisor                      __disk-server
//!  QEMU ---- monitor: "reset?" -> holds it,           serves the disks over NBD  ---- QEMU
//!            exchanges its memory, lets it run        searches the memory of before,
//!               | --- the memory of before --------->  answers from it
//!               |
//!               X  killed: the server sees it, starts another supervisor, and ends:
//!                  QEMU waits, and connects to that supervisor's server
//!                                                     X  killed: the supervisor starts another
//! ```
//!
//! Where both are killed at once the next command that looks at the guest starts them; until then its I/O waits. What a
//! server had in its cache goes with it. What it had written is in the files.
//!
//! The supervisor lives as long as the guest's QEMU. `run`, `restore` and `thaw` start it first: until it has seen a QEMU it
//! lives as long as the command that started it has the guest's lock. `upgrade` gives the guest another QEMU.

mod disks;
mod server;
mod server_watch;
mod state;
mod supervisor;
mod switch;

pub use disks::{ServedDisk, ServedDisks, recover};
pub(crate) use disks::{
    describe, described, forget, has_some, on_line, release_locks, said_of, serve_line,
    serve_record,
};
pub use server::serve;
pub use state::{LastReset, SearchState, ServedState};
pub use supervisor::supervise;
pub use switch::{CacheSwitch, switch_cache};
