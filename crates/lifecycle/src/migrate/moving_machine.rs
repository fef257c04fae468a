//! How a guest's QEMU is started again at the host that it comes to.

use super::disk_marks::{DiskMark, DiskMarks, first_other};
use crate::failure::{Code, Failure};
use dewar_guest::GuestError;
use dewar_guest_qemu::cmdline::{with_other_disks, without_server};
use dewar_guest_qemu::{Disk, QemuGuest};
use dewar_memory::{Ram, RamRegion};
use dewar_registry::{Forward, GuestFolder, GuestRecord, KeptDisk};
use dewar_units::{ByteSize, PAGE_BYTES};
use dewar_wire::control::{MOST_DISKS, Region};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
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
    /// Those that are files, as the source has them; none of those that are copied.
    pub files: Vec<KeptDisk>,
    /// Where they are on this host.
    #[serde(skip)]
    files_here: Vec<PathBuf>,
    /// How those are marked that can be; older sources mark none.
    #[serde(default)]
    pub marks: Vec<DiskMark>,
    /// Those that are copied, in the order of their connections.
    #[serde(default)]
    pub copied: Vec<CopiedDisk>,
}

/// A disk of which the other host gets a copy.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CopiedDisk {
    /// Its file there, which must not exist.
    pub path: PathBuf,
    /// Its format: what it stands on here is part of the copy there.
    pub format: String,
    /// The size that the guest sees.
    pub bytes: u64,
    /// How many bytes it takes on this host, without what it stands on.
    pub allocated: u64,
}

/// Which disks go along, and where they are at the other host.
#[derive(Debug, Clone, Default)]
pub struct MovingDisks {
    /// Whether the other host gets copies.
    pub copy: bool,
    /// Files here, and those in their place there.
    pub map: Vec<(PathBuf, PathBuf)>,
}

/// What the destination is told when the guest stands still.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct MovingState {
    /// The ports that its user-mode networks forward.
    pub forwards: Option<Vec<Forward>>,
}

impl MovingMachine {
    /// That of a guest that is as `checked` says.
    ///
    /// # Errors
    /// Where a disk cannot go along as `moving` says.
    pub fn of(
        guest: &QemuGuest,
        checked: &GuestRecord,
        moving: &MovingDisks,
    ) -> Result<Self, Failure> {
        let found = guest.found();
        let unfit = |why: String| Failure::new(Code::Unsupported, why);
        // Nobody serves its disks there.
        let line = without_server(&checked.arguments);
        let arguments = with_other_disks(&line, &checked.folder, &moving.map)
            .map_err(|why| unfit(why.to_string()))?;
        let here = |disk: &Disk| checked.folder.join(&disk.file);
        let real = |path: &Path| fs::canonicalize(checked.folder.join(path)).ok();
        let there = |disk: &Disk| {
            let path = here(disk);
            let is_it = |(from, _): &&(PathBuf, PathBuf)| real(from) == real(&path);
            moving.map.iter().find(is_it).map_or(path, |(_, to)| to.clone())
        };
        let copied = |disk: &Disk| CopiedDisk {
            path: there(disk),
            format: disk.format.clone(),
            bytes: disk.info.virtual_bytes,
            allocated: fs::metadata(here(disk)).map_or(0, |data| data.blocks() * 512),
        };
        let shared = |disk: &Disk| {
            let here = here(disk);
            KeptDisk::of(&here).map(|it| (it.known_as(there(disk)), here))
        };
        let disks = &found.disks;
        let is_file = |disk: &&Disk| fs::metadata(here(disk)).is_ok_and(|data| data.is_file());
        if let Some(disk) = disks.iter().find(|disk| moving.copy && !is_file(disk)) {
            let what = format!("its disk {} is no file: only files are copied", disk.file);
            return Err(unfit(what));
        }
        if moving.copy && disks.len() > usize::from(MOST_DISKS) {
            return Err(unfit(format!("{} disks are too many to be copied", disks.len())));
        }
        let (files, files_here) = disks.iter().filter(|_| !moving.copy).filter_map(shared).unzip();
        Ok(Self {
            files,
            files_here,
            marks: Vec::new(),
            copied: disks.iter().filter(|_| moving.copy).map(copied).collect(),
            disks: disks.iter().map(there).collect(),
            program: checked.program.clone(),
            arguments,
            folder: checked.folder.clone(),
            machine: found.machine.clone(),
            version: found.version.clone(),
        })
    }

    /// Marks the disks that are shared, until the value is dropped: the other host must find the marks.
    /// `number` is one that no other mark has.
    pub fn mark_disks(&mut self, number: u64) -> DiskMarks {
        let there = self.files.iter().map(|it| it.path.clone());
        let disks: Vec<_> = self.files_here.iter().cloned().zip(there).collect();
        let (made, told) = DiskMarks::make(&disks, number);
        self.marks = told;
        made
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
                 host has none of it ('--with-disks' with a '--disk-map' copies it)",
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
        let advice = "let both hosts reach it by this path, on shared storage, or copy it with \
                      '--with-disks'";
        let is_missing = |disk: &&PathBuf| self.copied.is_empty() && !disk.exists();
        if let Some(disk) = self.disks.iter().find(is_missing) {
            return Err(missing("its disk", disk).advice(advice));
        }
        let other = self.files.iter().find(|disk| !disk.is_same_file());
        match other.map(|disk| disk.path.as_path()).or_else(|| first_other(&self.marks)) {
            Some(path) => {
                let path = path.display();
                let what = format!("its disk, {path}, is another file on this host");
                Err(Failure::new(Code::Unsupported, what).advice(advice))
            }
            None => Ok(()),
        }
    }
}

impl MovingMachine {
    /// That the copies can be made, and that there is room for them.
    pub fn require_room(&self) -> Result<(), Failure> {
        let refused = |what: String| Failure::new(Code::Unsupported, what);
        let mut needed: HashMap<PathBuf, u64> = HashMap::new();
        for disk in &self.copied {
            let path = disk.path.display();
            if disk.path.symlink_metadata().is_ok() {
                return Err(refused(format!("the copy of its disk, {path}, is there already"))
                    .advice("remove it, or name another file with '--disk-map'"));
            }
            let parent = disk.path.parent().unwrap_or(Path::new("/"));
            if !parent.is_dir() {
                return Err(missing("the folder of its disk", parent));
            }
            *needed.entry(parent.to_owned()).or_default() += disk.allocated;
        }
        for (folder, bytes) in needed {
            let free = rustix::fs::statvfs(&folder).map(|it| it.f_bavail * it.f_frsize);
            if free.is_ok_and(|free| free < bytes) {
                let what = format!("{} has no room for its disks: they take", folder.display());
                return Err(refused(format!("{what} {}", ByteSize(bytes))));
            }
        }
        Ok(())
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
