//! A guest's life, whatever happens to the commands that work on it: started, checkpointed, restored,
//! upgraded, frozen, thawed, removed, and recovered.
//!
//! ```text
//!  Host ---- lock ----> LockedGuest ---- connect ----> AttachedGuest
//!    |                      |                              |
//!    |  recovery: what a    |  launch, adopt, restore,     |  checkpoint, upgrade, freeze:
//!    |  dead command left   |  thaw, remove                |  under a Guardian
//! ```
//!
//! - [`Host`]: the guests under one root. To lock a guest is to finish what a dead command left with it
//!   ([`recovery`]).
//! - [`helper`]: the processes beside commands. [`guardian`], [`page_server`], [`qos`] and [`served_disks`] have some.
//! - One module for each thing that is done with a guest. It turns options into calls of the crates
//!   below, keeps the guest's record true at each step, and fails with a [`Failure`].
//!
//! Nothing here prints: a [`Reporter`] is told how far the work is.
#![forbid(unsafe_code)]

pub mod adopt;
mod attached_guest;
pub mod checkpoint;
mod clock;
pub mod container;
pub mod container_process;
mod failure;
pub mod freeze;
mod frozen_state;
pub mod guardian;
pub mod held_ram;
pub mod helper;
mod host;
pub mod host_reboot;
mod hot_pages;
pub mod launch;
mod locked_guest;
pub mod migrate;
pub mod migration;
pub mod own_session;
pub mod page_cache;
pub mod page_server;
pub mod power;
pub mod process;
pub mod qos;
pub mod ram_dir;
mod ram_files;
pub mod reboot;
pub mod recovery;
pub mod remove;
mod reporter;
pub mod restore;
pub mod served_disks;
pub mod text;
pub mod thaw;
mod tracking;
pub mod upgrade;

pub use attached_guest::AttachedGuest;
pub use clock::Clock;
pub use failure::{Code, Failure, GONE};
pub use host::{Host, Recovered};
pub use locked_guest::{LockedGuest, NextGuest, loss, trouble, would_lose};
pub use reporter::{Flow, Reporter};
