//! The folder of one guest, and its lock.

use crate::error::{RegistryError, io_error};
use crate::frozen::{STATE_FILE, SUMS_FILE, THAWING_FILE};
use crate::json_file;
use crate::ram_file::remove_ram_file;
use crate::record::{GuestRecord, RamFile};
use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often a lock that somebody has is tried again.
const LOCK_POLL: Duration = Duration::from_millis(10);
/// How long a process of ours has the lock that sees to a guest which has just ended, or only looks who has it.
const A_LOOK: Duration = Duration::from_millis(300);

/// The file that is locked.
const LOCK: &str = "lock";

/// The folder of one guest.
#[derive(Debug, Clone)]
pub struct GuestFolder {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) unique_name: String,
    pub(crate) ram_prefix: String,
}

/// The right to work on a guest; other commands are kept out while it lives.
#[derive(Debug)]
pub struct GuestLock {
    file: File,
}

impl GuestLock {
    /// The lock from a descriptor that a dead command left us.
    pub fn inherit(fd: OwnedFd) -> Self {
        Self { file: File::from(fd) }
    }
}

impl AsFd for GuestLock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl GuestFolder {
    /// The guest's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A name that no other guest has, of this root or another.
    pub fn unique_name(&self) -> &str {
        &self.unique_name
    }

    /// The root that the folder is under.
    pub fn root(&self) -> &Path {
        self.path.parent().and_then(Path::parent).unwrap_or(&self.path)
    }

    /// A file in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The RAM file for backend `id` in `folder`; no other guest, of this root
    /// or another, has this name.
    pub fn ram_file(&self, folder: &Path, id: &str) -> PathBuf {
        folder.join(format!("{}{id}", self.ram_prefix))
    }

    /// Removes RAM files that a command left in `folder` which died before it
    /// could note them. Only while the guest is locked and does not run.
    ///
    /// # Errors
    /// Where one cannot be removed.
    pub fn sweep_ram(&self, folder: &Path) -> Result<(), RegistryError> {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&self.ram_prefix) {
                let path = entry.path();
                let removed = match path.is_dir() {
                    true => fs::remove_dir_all(&path),
                    false => remove_ram_file(&path).map(drop),
                };
                removed.map_err(io_error("remove", &path))?;
            }
        }
        Ok(())
    }

    /// Makes the folder where it is missing.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn make(&self) -> Result<(), RegistryError> {
        let make = DirBuilder::new().recursive(true).mode(0o700).create(&self.path);
        make.map_err(io_error("create", &self.path))
    }

    /// Takes the lock, as soon as nobody has it, within `patience`.
    ///
    /// # Errors
    /// As [`GuestFolder::lock`].
    pub fn lock_within(&self, patience: Duration) -> Result<GuestLock, RegistryError> {
        let (began, patience) = (Instant::now(), patience.max(A_LOOK));
        loop {
            match self.try_lock() {
                Err(RegistryError::Locked(_)) if began.elapsed() < patience => {
                    std::thread::sleep(LOCK_POLL);
                }
                locked => return locked,
            }
        }
    }

    /// Makes the folder where it is missing, and takes the lock. A process of ours that only looks at the guest is waited for.
    ///
    /// # Errors
    /// [`RegistryError::Locked`] where another command holds it.
    pub fn lock(&self) -> Result<GuestLock, RegistryError> {
        self.lock_within(Duration::ZERO)
    }

    /// The same without waiting: for one that looks whether a command has the guest.
    ///
    /// # Errors
    /// As [`GuestFolder::lock`].
    pub fn try_lock(&self) -> Result<GuestLock, RegistryError> {
        let path = self.file(LOCK);
        loop {
            self.make()?;
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path)
                .map_err(io_error("open", &path))?;
            flock(&file, FlockOperation::NonBlockingLockExclusive)
                .map_err(|_| RegistryError::Locked(self.name.clone()))?;
            // A command that removed the guest meanwhile has taken the file away: who comes next locks
            // another.
            let number = |data: fs::Metadata| (data.dev(), data.ino());
            let ours = file.metadata().map(number).map_err(io_error("look at", &path))?;
            if fs::metadata(&path).map(number).is_ok_and(|now| now == ours) {
                return Ok(GuestLock { file });
            }
        }
    }

    /// The guest's record.
    ///
    /// # Errors
    /// [`RegistryError::NoSuchGuest`] where there is none.
    pub fn record(&self) -> Result<GuestRecord, RegistryError> {
        self.record_if_any()?.ok_or_else(|| RegistryError::NoSuchGuest(self.name.clone()))
    }

    /// The guest's record, where there is one. What cannot be read is no guest that is not
    /// there.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn record_if_any(&self) -> Result<Option<GuestRecord>, RegistryError> {
        self.read("guest.json")
    }

    /// Writes the record.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn set_record(&self, record: &GuestRecord) -> Result<(), RegistryError> {
        self.write("guest.json", record)
    }

    /// Reads a JSON file of the folder; `None` where there is none.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, RegistryError> {
        json_file::read(&self.path, name)
    }

    /// Writes a JSON file of the folder in one step, and to disk.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), RegistryError> {
        json_file::write(&self.path, name, value)
    }

    /// The same for what is worth nothing when the host has restarted: it does not wait
    /// for the disk.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write_for_now<T: Serialize>(&self, name: &str, value: &T) -> Result<(), RegistryError> {
        json_file::write_for_now(&self.path, name, value)
    }

    /// Removes a file of the folder, if it is there, for good.
    ///
    /// # Errors
    /// Where it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<(), RegistryError> {
        json_file::remove(&self.path, name)
    }

    /// Removes the RAM files of a guest whose process has ended. Their memory is
    /// given back when what is returned is dropped, which takes a while.
    ///
    /// # Errors
    /// Where one cannot be removed.
    pub fn remove_ram(&self, record: &GuestRecord) -> Result<Vec<File>, RegistryError> {
        let mut unnamed = Vec::new();
        self.remove_kept(&record.ram);
        for path in &record.owned_ram {
            unnamed.extend(remove_ram_file(path).map_err(io_error("remove", path))?);
        }
        Ok(unnamed)
    }

    /// Removes what was kept beside the RAM of a frozen guest, when it runs.
    pub fn remove_kept(&self, ram: &[RamFile]) {
        // What stays, the next freeze writes over.
        for beside in ram.iter().filter_map(|file| file.path.parent()) {
            let _ = fs::remove_file(self.ram_file(beside, STATE_FILE));
        }
        for name in [STATE_FILE, SUMS_FILE, THAWING_FILE] {
            let _ = fs::remove_file(self.file(name));
        }
    }

    /// Removes the folder, and with it the guest. The lock is the last to go: until then nobody else
    /// is let in.
    ///
    /// # Errors
    /// Where something cannot be removed.
    pub fn remove_all(&self) -> Result<(), RegistryError> {
        for entry in fs::read_dir(&self.path).map_err(io_error("list", &self.path))?.flatten() {
            let path = entry.path();
            let removed = match entry.file_type().is_ok_and(|it| it.is_dir()) {
                true => fs::remove_dir_all(&path),
                false if entry.file_name() == LOCK => Ok(()),
                false => fs::remove_file(&path),
            };
            match removed {
                // A QEMU that is ending takes its socket away by itself.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed.map_err(io_error("remove", &path))?,
            }
        }
        let _ = fs::remove_file(self.file(LOCK));
        match fs::remove_dir(&self.path) {
            // Another command has begun something under the name.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => removed.map_err(io_error("remove", &self.path)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Registry;

    /// Our own processes look at a guest for a moment, just when it has ended: a command that comes then is not to fail.
    #[test]
    fn a_look_is_waited_for_and_a_command_at_work_is_not() {
        let root = tempfile::tempdir().expect("tempdir");
        let folder = Registry::new(root.path()).guest("g").expect("name");
        let is_locked = |lock| matches!(lock, Err(RegistryError::Locked(name)) if name == "g");
        let looks = folder.try_lock().expect("nobody has it");
        assert!(is_locked(folder.try_lock()));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(A_LOOK / 3);
                drop(looks);
            });
            let lock = folder.lock().expect("it was a look");
            assert!(is_locked(folder.lock()), "this one is at work");
            drop(lock);
        });
        folder.lock().expect("nobody has it");
    }
}
