//! How a guest's QEMU is started again at the host that it comes to.

use crate::failure::{Code, Failure};
use dewar_guest::GuestError;
use dewar_guest_qemu::QemuGuest;
use dewar_memory::{Ram, RamRegion};
use dewar_registry::{Forward, GuestFolder, GuestRecord, KeptDisk};
use dewar_units::PAGE_BYTES;
use dewar_wire::control::Region;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What the destination is told of a guest's QEMU.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct MovingMachine {
    /// The QEMU program.
    pub program: PathBuf,
    /// The user's own arguments, as QEMU is now.
    pub arguments: Vec<String>,
    /// The folder in which QEMU was started.
    pub folder: PathBuf,
    /// The machine type with its version.
    pub machine: String,
    /// QEMU's version.
    pub version: String,
    /// Its writable disks.
    pub disks: Vec<PathBuf>,
    /// Those that are files, as the source has them.
    pub files: Vec<KeptDisk>,
}

/// What the destination is told when the guest stands still.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct MovingState {
    /// The ports that its user-mode networks forward.
    pub forwards: Option<Vec<Forward>>,
}

impl MovingMachine {
    /// That of a guest that is as `checked` says.
    pub fn of(guest: &QemuGuest, checked: &GuestRecord) -> Self {
        let found = guest.found();
        let disks = found.disks.iter().map(|disk| checked.folder.join(&disk.file));
        let disks: Vec<PathBuf> = disks.collect();
        Self {
            files: disks.iter().filter_map(|path| KeptDisk::of(path)).collect(),
            program: checked.program.clone(),
            arguments: checked.arguments.clone(),
            folder: checked.folder.clone(),
            machine: found.machine.clone(),
            version: found.version.clone(),
            disks,
        }
    }

    /// That its disks are not ours to remove with the guest.
    pub fn require_shared_disks(&self, folder: &GuestFolder) -> Result<(), Failure> {
        let own = folder.file("");
        let Some(disk) = self.disks.iter().find(|disk| disk.starts_with(&own)) else {
            return Ok(());
        };
        let error = GuestError::Unsupported {
            guest: folder.name().to_owned(),
            reasons: vec![format!(
                "its disk {} lies in its folder on this host, where a restore put it: the other \
                 host has none of it",
                disk.display()
            )],
        };
        Err(Failure::from(error))
    }

    /// The QEMU program of this host: the same file, or one of that name where programs are.
    pub fn program_here(&self) -> Result<PathBuf, Failure> {
        if self.program.is_file() {
            return Ok(self.program.clone());
        }
        let name = self.program.file_name().unwrap_or_default();
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&folders).map(|it| it.join(name)).find(|it| it.is_file());
        found.ok_or_else(|| missing("the QEMU program", &self.program))
    }

    /// That the files that the guest needs are here.
    pub fn require_files(&self) -> Result<(), Failure> {
        if !self.folder.is_dir() {
            return Err(missing("the folder that its QEMU runs in", &self.folder));
        }
        let advice = "let both hosts reach it by this path, on shared storage";
        if let Some(disk) = self.disks.iter().find(|disk| !disk.exists()) {
            return Err(missing("its disk", disk).advice(advice));
        }
        match self.files.iter().find(|disk| !disk.is_same_file()) {
            Some(disk) => {
                let path = disk.path.display();
                let what = format!("its disk, {path}, is another file on this host");
                Err(Failure::new(Code::Unsupported, what).advice(advice))
            }
            None => Ok(()),
        }
    }
}

fn missing(what: &str, path: &Path) -> Failure {
    let text = format!("{what}, {}, is not on this host", path.display());
    Failure::new(Code::Unsupported, text)
}

/// A guest's RAM, as the destination is told of it: in the order in which its pages are counted.
pub(super) fn regions(ram: &Ram) -> Vec<Region> {
    let region = |region: &RamRegion| Region {
        name: region.name.clone(),
        bytes: region.pages.count() * PAGE_BYTES as u64,
    };
    ram.regions().iter().map(region).collect()
}
