//! The system calls that Dewar makes and the unsafe code they need, behind
//! safe functions: userfaultfd, `PAGEMAP_SCAN`, injection of a system call
//! into another process, shared mappings, scheduling classes.
//!
//! Nothing here knows what a guest is.

mod byte_lock;
mod detach;
mod error;
mod hold;
mod inherited;
mod inject;
mod kexec;
mod live_update;
mod mapping;
mod page_cache;
mod pagemap;
mod process;
mod remote;
mod reserve;
mod sched;
mod session;
mod signals;
mod tap;
mod tsc;
mod uffd;
mod user;
mod wake;

pub use byte_lock::{is_byte_locked, lock_byte, unlock_byte};
pub use detach::{detach, die_with_us, in_network, inherit};
pub use error::KernelError;
pub use hold::{HeldThread, ThreadHolder};
pub use inherited::inherited;
pub use inject::{Injection, inject_past_filter, inject_syscall};
pub use kexec::{kexec, kexec_load, kexec_unload};
pub use live_update::{LiveSession, LiveUpdate};
pub use mapping::{
    Free, SharedMapping, WritableMapping, available_memory, data_ranges, free, huge_page_bytes,
    is_dax, nonzero_ranges, punch_hole,
};
pub use page_cache::{cached_pages, read_when_idle};
pub use pagemap::{Pagemap, ScannedRange};
pub use process::{Pid, ProcessHandle, RemoteFd, list_fds, peer_of};
pub use remote::{
    UffdOrigin, close_left_userfaultfds_of, duplicate_in, known_userfaultfd_of, map_over_in,
    new_userfaultfd_of, passing_userfaultfd_of, populate_small_pages_in, unmap_in, userfaultfd_of,
};
pub use reserve::{Reservation, Scheduling, Task, deadline_limit, reserved_tasks, threads_of};
pub use sched::{ThreadActivity, ThreadId};
pub use session::{OwnSession, are_sessions_groups};
pub use signals::{end_signals, heed_children, run_on};
pub use tap::{set_tap_header_bytes, tap_header_bytes};
pub use tsc::guest_tsc_khz;
pub use uffd::{Fault, RegisterMode, Userfaultfd, is_tracking_supported, open_userfaultfd_device};
pub use user::User;
pub use wake::WakeTimer;
