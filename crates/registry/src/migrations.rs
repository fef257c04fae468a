//! What is on disk of migrations: a file each, which outlives the guest's folder. A host must be able to
//! say what became of a guest that it has had and has no more.

use crate::error::{RegistryError, io_error};
use crate::json_file;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The records of migrations under one root, each named by its session.
#[derive(Debug, Clone)]
pub struct Migrations {
    folder: PathBuf,
}

impl Migrations {
    /// Those under `root`.
    pub fn new(root: &Path) -> Self {
        Self { folder: root.join("migrations") }
    }

    /// What is on record of one; `None` where nothing is.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn read<T: DeserializeOwned>(&self, session: u64) -> Result<Option<T>, RegistryError> {
        json_file::read(&self.folder, &file_name(session))
    }

    /// Makes the folder, so that a record can be written as fast as the disk is.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn make(&self) -> Result<(), RegistryError> {
        if self.folder.is_dir() {
            return Ok(());
        }
        let make = DirBuilder::new().recursive(true).mode(0o700).create(&self.folder);
        make.map_err(io_error("create", &self.folder))?;
        // A record that is on disk is to be found there.
        let root = self.folder.parent().unwrap_or(&self.folder);
        File::open(root).and_then(|it| it.sync_all()).map_err(io_error("sync", root))
    }

    /// Writes what is on record of one, in one step and to disk.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write(&self, session: u64, record: &impl Serialize) -> Result<(), RegistryError> {
        self.make()?;
        json_file::write(&self.folder, &file_name(session), record)
    }

    /// Removes the record of one, for good.
    ///
    /// # Errors
    /// Where it cannot be removed.
    pub fn remove(&self, session: u64) -> Result<(), RegistryError> {
        json_file::remove(&self.folder, &file_name(session))
    }
}

fn file_name(session: u64) -> String {
    format!("{session:016x}.json")
}
