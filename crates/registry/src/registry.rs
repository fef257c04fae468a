//! All guests under one root.

use crate::error::{RegistryError, io_error};
use crate::folder::GuestFolder;
use crate::host_lock::{self, HostLock};
use crate::json_file;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// How the names of all RAM files begin that are Dewar's.
pub const RAM_PREFIX: &str = "dewar-";
/// The root of everything that Dewar keeps on a host.
#[derive(Debug, Clone)]
pub struct Registry {
    root: PathBuf,
}

impl Registry {
    /// The registry in `root`.
    pub fn new(root: &Path) -> Self {
        Self { root: std::path::absolute(root).unwrap_or_else(|_| root.to_owned()) }
    }

    /// The root folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A short text that tells this root from others on the host.
    pub fn tag(&self) -> String {
        format!("{:08x}", fnv1a(self.root.as_os_str().as_bytes()))
    }

    /// The default store's folder.
    pub fn default_store(&self) -> PathBuf {
        self.root.join("store")
    }

    /// The names of all guests, in order.
    ///
    /// # Errors
    /// Where they cannot be listed: who asks may remove what no guest needs.
    pub fn names(&self) -> Result<Vec<String>, RegistryError> {
        let folder = self.root.join("guests");
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries
                .and_then(Iterator::collect::<io::Result<Vec<_>>>)
                .map_err(io_error("list", &folder))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let record = entry.path().join("guest.json");
            if record.try_exists().map_err(io_error("look for", &record))? {
                names.extend(entry.file_name().into_string());
            }
        }
        names.sort();
        Ok(names)
    }

    /// The right to do what concerns all guests at once; the root is made where it is missing.
    ///
    /// # Errors
    /// [`RegistryError::Busy`] where another command has it.
    pub fn lock_host(&self) -> Result<HostLock, RegistryError> {
        let make = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.root);
        make.map_err(io_error("create", &self.root))?;
        host_lock::lock(&self.root)
    }

    /// Reads a file that is the host's, and no one guest's; `None` where there is none.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, RegistryError> {
        json_file::read(&self.root, name)
    }

    /// Writes one, in one step and to disk.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write(&self, name: &str, value: &impl Serialize) -> Result<(), RegistryError> {
        json_file::write(&self.root, name, value)
    }

    /// Removes one, if it is there, for good.
    ///
    /// # Errors
    /// Where it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<(), RegistryError> {
        json_file::remove(&self.root, name)
    }

    /// The folder of a guest, existing or not.
    ///
    /// # Errors
    /// Where the name cannot be a guest's.
    pub fn guest(&self, name: &str) -> Result<GuestFolder, RegistryError> {
        let fits = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        let first = name.chars().next();
        if name.len() > 40
            || !name.chars().all(fits)
            || !first.is_some_and(|it| it.is_ascii_alphanumeric())
        {
            return Err(RegistryError::BadName(name.to_owned()));
        }
        // '@' is in no name, so no guest's prefix begins another's.
        let unique_name = format!("{}@{name}", self.tag());
        let ram_prefix = format!("{RAM_PREFIX}{unique_name}@");
        let path = self.root.join("guests").join(name);
        Ok(GuestFolder { name: name.to_owned(), path, unique_name, ram_prefix })
    }
}

/// FNV-1a, 32 bits: the same in every build.
fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}
