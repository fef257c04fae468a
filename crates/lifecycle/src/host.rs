//! The guests of a host, under one root: what every command starts from.

use crate::failure::Failure;
use crate::locked_guest::{LockedGuest, TROUBLE, trouble};
use crate::ram_dir::usual_dirs;
use crate::recovery::recover_and_start;
use dewar_guest_qemu::RamRoom;
use dewar_image::{Location, Store};
use dewar_kernel::KernelError;
use dewar_qos::Ledger;
use dewar_registry::{GuestFolder, GuestLock, GuestRecord, Registry, RegistryError};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where root's commands note what CPU time of this host was promised.
const HOST_LEDGER: &str = "/run/dewar/qos";

/// The guests under one root.
#[derive(Debug)]
pub struct Host {
    /// Their folders.
    pub registry: Registry,
}

/// How all guests are after [`Host::recover_all`].
#[derive(Debug)]
pub struct Recovered {
    /// What could not be finished, and which guests cannot be told of.
    pub failures: Vec<Failure>,
    /// Guests that another command was at work on.
    pub busy: Vec<String>,
}

impl Host {
    /// The guests under `root`.
    pub fn new(root: &Path) -> Self {
        Self { registry: Registry::new(root) }
    }

    /// Where the store is that `url` means; without one the default store.
    ///
    /// # Errors
    /// Where it is no URL of a store.
    pub fn store_location(&self, url: Option<&str>) -> Result<Location, Failure> {
        match url {
            None => Ok(Location::Folder(self.registry.default_store())),
            Some(url) => Ok(Location::parse(url)?),
        }
    }

    /// Opens a store that must exist.
    ///
    /// # Errors
    /// Where it does not, or cannot be read.
    pub fn store(&self, url: Option<&str>) -> Result<Store, Failure> {
        Ok(Store::open(&self.store_location(url)?)?)
    }

    /// To whom CPU time is promised: for root that of all roots of the host.
    pub fn qos_ledger(&self) -> Ledger {
        match rustix::process::geteuid().is_root() {
            true => Ledger::new(HOST_LEDGER).within(self.registry.tag()),
            false => Ledger::new(self.qos_folder()),
        }
    }

    /// Where controllers of this root have their sockets and logs.
    pub fn qos_folder(&self) -> PathBuf {
        self.registry.root().join("qos")
    }

    /// Locks a guest, and finishes what a dead command left with it.
    ///
    /// # Errors
    /// Where there is no such guest, another command has it, or it cannot be finished.
    pub fn lock(&self, name: &str) -> Result<LockedGuest, Failure> {
        self.lock_after(name, |_, _| Ok(()))
    }

    /// The same, after `first` did something for a guest whose QEMU may not be able to answer until
    /// then.
    ///
    /// # Errors
    /// As [`Host::lock`], and those of `first`.
    pub fn lock_after(
        &self,
        name: &str,
        first: impl FnOnce(&GuestFolder, &mut GuestRecord) -> Result<(), Failure>,
    ) -> Result<LockedGuest, Failure> {
        self.lock_with(name, GuestFolder::lock, first)
    }

    /// The same as [`Host::lock`], where another command that has the guest may have so long to
    /// end.
    ///
    /// # Errors
    /// As [`Host::lock`].
    pub fn lock_within(&self, name: &str, patience: Duration) -> Result<LockedGuest, Failure> {
        self.lock_with(name, |folder| folder.lock_within(patience), |_, _| Ok(()))
    }

    fn lock_with(
        &self,
        name: &str,
        lock: impl FnOnce(&GuestFolder) -> Result<GuestLock, RegistryError>,
        first: impl FnOnce(&GuestFolder, &mut GuestRecord) -> Result<(), Failure>,
    ) -> Result<LockedGuest, Failure> {
        let folder = self.registry.guest(name)?;
        folder.record()?;
        let lock = lock(&folder)?;
        // Read again: the command that held the lock may have changed it.
        let mut record = folder.record()?;
        first(&folder, &mut record)?;
        let record = recover_and_start(&folder, record)?;
        Ok(LockedGuest { folder, record, lock })
    }

    /// Locks a guest that is to be ended. Nothing is finished through its QEMU, which may not
    /// answer: see [`LockedGuest::end`].
    ///
    /// # Errors
    /// Where there is no such guest, or another command has it.
    pub fn lock_to_end(&self, name: &str) -> Result<LockedGuest, Failure> {
        let folder = self.registry.guest(name)?;
        folder.record()?;
        let lock = folder.lock()?;
        let record = folder.record()?;
        Ok(LockedGuest { folder, record, lock })
    }

    /// What there is for the RAM of guest `name` in a folder. With `overcommit` there is
    /// always enough.
    ///
    /// # Errors
    /// Where the folder's file system cannot be asked.
    pub fn ram_room(
        &self,
        name: &str,
        folder: &Path,
        overcommit: bool,
    ) -> Result<RamRoom, KernelError> {
        if overcommit {
            return Ok(RamRoom { free: u64::MAX, promised: 0 });
        }
        // A guest that a command works on may be about to come back, in files of the same names.
        let ended = |(folder, record): &(GuestFolder, GuestRecord)| {
            record.name != name
                && record.frozen.is_none()
                && !record.process.is_alive()
                && folder.try_lock().is_ok()
        };
        // Of guests that cannot be listed all counts.
        let ended = self.guests().unwrap_or_default().into_iter().filter(ended);
        let files = ended.flat_map(|(_, record)| record.owned_ram).collect();
        RamRoom::look(folder, &usual_dirs(), &files)
    }

    /// All guests with their records; a guest that is removed meanwhile is left out.
    ///
    /// # Errors
    /// Where they cannot be listed, or a record cannot be read.
    pub fn guests(&self) -> Result<Vec<(GuestFolder, GuestRecord)>, Failure> {
        let mut guests = Vec::new();
        for name in self.registry.names()? {
            let folder = self.registry.guest(&name)?;
            if let Some(record) = folder.record_if_any()? {
                guests.push((folder, record));
            }
        }
        Ok(guests)
    }

    /// Finishes what dead commands left with guests that no command works on. What cannot be
    /// finished is a failure once; from then on it is only known of ([`trouble`]), and in no other
    /// command's way.
    ///
    /// # Errors
    /// Where the guests cannot be listed.
    pub fn recover_all(&self) -> Result<Recovered, Failure> {
        self.qos_ledger().recover();
        let (mut failures, mut busy) = (Vec::new(), Vec::new());
        for name in self.registry.names()? {
            let record = self.registry.guest(&name).and_then(|folder| folder.record());
            if let Err(error @ (RegistryError::Io { .. } | RegistryError::BadName(_))) = record {
                failures.push(error.into());
                continue;
            }
            // Not waited for: there may be many that commands work on.
            match self.lock_with(&name, GuestFolder::try_lock, |_, _| Ok(())) {
                Ok(guest) => drop(guest.folder.remove(TROUBLE)),
                Err(failure) if failure.is_attention() => {
                    failures.extend(self.not_told_before(&name, failure));
                }
                // Another command is at work, or the guest went just now.
                Err(_) => busy.push(name),
            }
        }
        Ok(Recovered { failures, busy })
    }

    /// A failure that was not told before; it is noted that it is told now.
    fn not_told_before(&self, name: &str, failure: Failure) -> Option<Failure> {
        let folder = self.registry.guest(name).ok()?;
        let what = failure.whole();
        if trouble(&folder).as_deref() == Some(what.as_str()) {
            return None;
        }
        // Where it cannot be noted it is told again.
        let _ = folder.write_for_now(TROUBLE, &what);
        Some(failure)
    }
}
