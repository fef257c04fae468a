//! The locks that QEMU takes on the file of a disk, which keep another QEMU away, and this one where there is another.
//!
//! A guest that moves to another host, with its disk on storage that both reach, gives the locks up before it is given
//! away, and the other host's QEMU takes them. Should it stay after all, its next read or write takes them again; a write
//! fails where another has them.

use crate::error::BlockError;
use dewar_kernel::{is_byte_locked, lock_byte, unlock_byte};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

/// QEMU's locks (block/file-posix.c): one byte for each thing that is done to a file, and one for each that nobody else may
/// do meanwhile.
const DOES: u64 = 100;
const FORBIDS: u64 = 200;
/// Its numbers for those things (include/block/block-common.h).
const READ: u64 = 0;
const WRITE: u64 = 1;
const RESIZE: u64 = 3;
/// How long a write waits for locks that were given up.
const AGAIN_WITHIN: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(20);

/// The locks on the file of a disk.
#[derive(Debug)]
pub(crate) struct DiskLock {
    path: PathBuf,
    is_read_only: bool,
    is_held: RwLock<bool>,
}

impl DiskLock {
    /// Takes them.
    ///
    /// # Errors
    /// [`BlockError::InUse`] where another program has the file.
    pub(crate) fn take(file: &File, path: &Path, is_read_only: bool) -> Result<Self, BlockError> {
        let lock = Self { path: path.to_owned(), is_read_only, is_held: RwLock::new(true) };
        lock.lock(file).map(|()| lock)
    }

    /// Leaves them to another, until they are taken by who uses the file.
    pub(crate) fn later(path: &Path, is_read_only: bool) -> Self {
        Self { path: path.to_owned(), is_read_only, is_held: RwLock::new(false) }
    }

    pub(crate) fn is_held(&self) -> bool {
        *self.is_held.read().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Takes them, if they were given up and nobody else has them: who only reads does not need them, but others are to
    /// see that the file is in use.
    pub(crate) fn try_again(&self, file: &File) {
        if self.is_held() {
            return;
        }
        let mut held = self.is_held.write().unwrap_or_else(|broken| broken.into_inner());
        if !*held {
            *held = self.lock(file).is_ok();
        }
    }

    /// Keeps them from being given up as long as what is returned is there: while something is written. Takes them, if they
    /// were given up.
    ///
    /// # Errors
    /// Where another has them by now.
    pub(crate) fn to_write(&self, file: &File) -> io::Result<RwLockReadGuard<'_, bool>> {
        let deadline = Instant::now() + AGAIN_WITHIN;
        loop {
            let held = self.is_held.read().unwrap_or_else(|broken| broken.into_inner());
            if *held {
                return Ok(held);
            }
            drop(held);
            let mut held = self.is_held.write().unwrap_or_else(|broken| broken.into_inner());
            if !*held {
                match self.lock(file) {
                    Ok(()) => *held = true,
                    Err(error) if Instant::now() > deadline => return Err(io::Error::other(error)),
                    Err(_) => {
                        drop(held);
                        std::thread::sleep(LOOK);
                    }
                }
            }
        }
    }

    /// Gives them up, when what is being written is done.
    pub(crate) fn release(&self, file: &File) {
        let mut held = self.is_held.write().unwrap_or_else(|broken| broken.into_inner());
        self.unlock(file);
        *held = false;
    }

    fn lock(&self, file: &File) -> Result<(), BlockError> {
        let locked = self.try_to_lock(file);
        if locked.is_err() {
            self.unlock(file);
        }
        locked
    }

    fn try_to_lock(&self, file: &File) -> Result<(), BlockError> {
        let (does, forbids) = self.things();
        let failed = |cause| BlockError::Lock { path: self.path.clone(), cause };
        for (from, things) in [(DOES, does), (FORBIDS, forbids)] {
            things.iter().try_for_each(|it| lock_byte(file, from + it)).map_err(failed)?;
        }
        for (from, things) in [(FORBIDS, does), (DOES, forbids)] {
            for thing in things {
                if is_byte_locked(file, from + thing).map_err(failed)? {
                    return Err(BlockError::InUse { path: self.path.clone() });
                }
            }
        }
        Ok(())
    }

    fn unlock(&self, file: &File) {
        let (does, forbids) = self.things();
        for (from, things) in [(DOES, does), (FORBIDS, forbids)] {
            // Where a file system refuses that, it had no locks to give.
            things.iter().for_each(|it| drop(unlock_byte(file, from + it)));
        }
    }

    /// What is done to the file, and what nobody else may do.
    fn things(&self) -> (&'static [u64], &'static [u64]) {
        match self.is_read_only {
            true => (&[READ], &[WRITE, RESIZE]),
            false => (&[READ, WRITE, RESIZE], &[WRITE, RESIZE]),
        }
    }
}
