//! Stock QEMU as a guest: its command lines, its control protocol, its disks
//! and device state.
//!
//! - [`cmdline`]: what `run` changes on a command line, and what `restore` does.
//! - [`launch`], [`start_from_state`]: starting a QEMU, and starting a guest again.
//! - [`QemuGuest`]: a running one as a [`dewar_guest::Guest`].
//! - [`Incoming`]: a guest on its way into a QEMU that waits for it.
//! - [`identity`]: what tells a copy of a guest from it.
//! - [`handover`]: moving a running one to another QEMU.
//! - [`freeze`]: a guest without a process, and back.
//! - [`reset`]: a guest that is held at its reset, and gets other memory there.
//! - [`rollback`]: undoing whatever a command that died left under way.
#![forbid(unsafe_code)]

mod agent;
mod bitmaps;
pub mod cmdline;
mod discover;
mod disks;
pub mod freeze;
mod guest;
pub mod handover;
pub mod identity;
mod incoming;
mod journal;
pub mod launch;
mod machine;
mod namespaces;
mod nbd;
mod qemu_img;
mod qemu_user;
mod qmp;
mod qmp_events;
mod ram_room;
mod recover;
pub mod reset;
mod rollback;
mod run_state;
pub mod start_from_state;
mod state;
mod uffd_access;

pub use agent::{Agent, AgentError};
pub use bitmaps::remove_all as remove_bitmaps;
pub use discover::{Discovered, Disk, discover, map_backends, map_ram_files};
pub use disks::DiskError;
pub use disks::mirror::{
    MirrorProgress, begin_mirrors, end_exports, export_disks, make_disk, mirror_progress,
};
pub use guest::QemuGuest;
pub use incoming::{Committed, Incoming, IncomingError};
pub use journal::{Current, Journal, JournaledDisk};
pub use qemu_user::QemuUser;
pub use qmp::{Qmp, QmpError};
pub use ram_room::RamRoom;
pub use recover::{RecoverError, recover};
pub use rollback::{END_WITHIN, RollbackError, rollback};
pub use run_state::RunState;
pub use state::StateError;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Receives a descriptor that [`send_fd`] sent.
///
/// # Errors
/// Where the other end is gone or sent none.
pub fn receive_fd(socket: impl AsFd) -> std::io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    ancillary
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        })
        .ok_or_else(|| std::io::Error::other("no descriptor came"))
}

/// Sends a descriptor over a unix socket, with one byte.
///
/// # Errors
/// Where the other end is gone.
pub fn send_fd(socket: impl AsFd, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
    qmp::send_with_fd(socket.as_fd(), b".", Some(fd)).map(drop)
}
