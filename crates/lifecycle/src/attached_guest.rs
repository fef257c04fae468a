//! A guest whose QEMU this command is connected to.

use crate::container_process::require_machine;
use crate::failure::Failure;
use crate::host::Host;
use crate::locked_guest::LockedGuest;
use crate::reporter::Reporter;
use dewar_guest_qemu::QemuGuest;
use dewar_registry::{GuestFolder, GuestLock};
use std::time::Duration;

/// A guest that runs, has all its memory, and is ours to work on.
#[derive(Debug)]
pub struct AttachedGuest {
    /// The guest.
    pub guest: QemuGuest,
    /// Its folder.
    pub folder: GuestFolder,
    /// Its lock.
    pub lock: GuestLock,
}

impl AttachedGuest {
    /// Locks a guest and connects to its QEMU. Another command that has the guest may have so long
    /// to end.
    ///
    /// # Errors
    /// Where the guest does not run, or its memory does not arrive.
    pub fn lock(
        host: &Host,
        name: &str,
        patience: Duration,
        reporter: &dyn Reporter,
    ) -> Result<Self, Failure> {
        let locked = host.lock_within(name, patience)?;
        require_machine(&locked.record)?;
        locked.require_alive()?;
        locked.wait_for_memory(reporter)?;
        let LockedGuest { folder, record, lock } = locked;
        let guest = QemuGuest::attach(folder.clone(), record)
            .map_err(|error| Failure::from(error).state("the guest was not touched"))?;
        Ok(Self { guest, folder, lock })
    }
}
