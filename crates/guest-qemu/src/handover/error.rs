//! Why a guest could not be handed over.

use crate::disks::DiskError;
use crate::launch::LaunchError;
use crate::qmp::QmpError;
use crate::rollback::RollbackError;
use crate::state::StateError;
use dewar_guest::GuestError;
use dewar_registry::RegistryError;
use std::path::PathBuf;

/// Why a guest could not be handed over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// It cannot be; nothing was touched.
    #[error("{0} cannot be handed over: {1}")]
    Unsupported(String, String),
    /// The new QEMU does not start.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The new QEMU is not what the guest needs.
    #[error("{} {why}", program.display())]
    Unfit {
        /// The new program.
        program: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The new QEMU could not load the guest's state.
    #[error("{} did not take the guest over: {why}", program.display())]
    Refused {
        /// The new program.
        program: PathBuf,
        /// What it said.
        why: String,
    },
    /// The guest moved, and ended there.
    #[error("the new QEMU took the guest over and ended at once; the guest has crashed")]
    Crashed,
    /// The guest moved, and not all of it could be put in order.
    #[error("the guest moved to its new QEMU, but: {0}")]
    Unfinished(Box<HandoverError>),
    /// The guest moved, and its old QEMU is still there.
    #[error("its old QEMU, process {0}, which stands still, does not end")]
    Lingers(i32),
    /// Everybody who could tell whether the guest ran in the new QEMU is gone.
    #[error(
        "the new QEMU of {0} ended in the hand-over, and nobody saw whether the guest ran in it; \
         the old one, process {1}, stands still"
    )]
    Unknown(String, i32),
    /// The guest.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// A disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// A migration.
    #[error(transparent)]
    State(#[from] StateError),
    /// The guest's folder.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Putting the old QEMU back.
    #[error(transparent)]
    PutBack(#[from] Box<RollbackError>),
}
