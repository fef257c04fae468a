//! A file system with little room (a tmpfs of its own).

use crate::slow_disk::run;
use anyhow::Result;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A small file system, unmounted when this is dropped.
#[derive(Debug)]
pub struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    /// Mounts one at `path`, which is made; `size` as mount(8) takes it.
    ///
    /// # Errors
    /// Where it cannot be mounted.
    pub fn mount(path: &Path, size: &str) -> Result<Self> {
        fs::create_dir_all(path)?;
        let option = format!("size={size}");
        run(Command::new("mount").args(["-t", "tmpfs", "-o", &option, "none"]).arg(path))?;
        Ok(Self { path: path.to_owned() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes all of its room.
    ///
    /// # Errors
    /// Where that fails for another reason than that it is full.
    pub fn fill(&self) -> Result<()> {
        let mut file = fs::File::create(self.filler())?;
        loop {
            match file.write_all(&[1; 4096]) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Gives its room back.
    ///
    /// # Errors
    /// Where it was not taken.
    pub fn free(&self) -> Result<()> {
        Ok(fs::remove_file(self.filler())?)
    }

    fn filler(&self) -> PathBuf {
        self.path.join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Somebody may still have a file of it.
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}
