//! Disk copies of a guest whose store is no folder: on their way there, and
//! brought back from there.

use crate::error::{RegistryError, io_error};
use crate::folder::GuestFolder;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

const SCRATCH: &str = "scratch";
const BASES: &str = "base";

impl GuestFolder {
    /// Makes an empty folder for files that only the command in hand needs.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn make_scratch(&self) -> Result<PathBuf, RegistryError> {
        self.remove_scratch();
        let path = self.file(SCRATCH);
        DirBuilder::new().mode(0o700).create(&path).map_err(io_error("create", &path))?;
        Ok(path)
    }

    /// Removes it; what stays, the next one removes.
    pub fn remove_scratch(&self) {
        let _ = fs::remove_dir_all(self.file(SCRATCH));
    }

    /// Where saved disks lie that were brought here to restore the guest.
    pub fn base_disks(&self) -> PathBuf {
        self.file(BASES)
    }

    /// Makes that folder.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn make_base_disks(&self) -> Result<PathBuf, RegistryError> {
        let path = self.base_disks();
        let make = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        make.map_err(io_error("create", &path))?;
        Ok(path)
    }

    /// Removes saved disks that the guest does not stand on.
    pub fn remove_other_base_disks(&self, kept: &[PathBuf]) {
        for entry in fs::read_dir(self.base_disks()).into_iter().flatten().flatten() {
            if !kept.contains(&entry.path()) {
                // What stays, the next restore or 'rm' removes.
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}
