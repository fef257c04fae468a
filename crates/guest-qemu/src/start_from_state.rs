//! Starting a guest again from what an image says of it.

use crate::cmdline::{PlannedRegion, RestorePlan, Unsupported, disk_places, plan_restore};
use crate::disks::{DiskError, create_empty, create_overlay};
use crate::qemu_user::QemuUser;
use crate::run_state::RunState;
use dewar_registry::GuestFolder;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// What `QemuGuest::machine` writes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Machine {
    /// The QEMU program.
    pub program: PathBuf,
    /// The user's own arguments.
    pub arguments: Vec<String>,
    /// The folder in which QEMU was started.
    pub folder: PathBuf,
    /// QEMU's version.
    pub version: String,
    /// The machine type with its version.
    pub machine: String,
    /// The writable disks: name, and place on the command line.
    pub disks: Vec<MachineDisk>,
    /// Those that were left out.
    #[serde(default)]
    pub excluded: Vec<ExcludedDisk>,
    /// How it stood when it was saved, in QEMU's word; an image of before this was noted
    /// says nothing, and its guest is let run where QEMU lets it.
    #[serde(default)]
    pub run_state: Option<String>,
}

impl Machine {
    /// Whether the guest ran when it was saved, as far as that was noted.
    pub fn was_running(&self) -> bool {
        self.run_state.as_deref().is_none_or(|word| RunState::named(word).is_running())
    }
}

/// A writable disk of a [`Machine`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MachineDisk {
    /// The hypervisor's name for it.
    pub name: String,
    /// Its index among the disk files of the command line.
    pub place: usize,
}

/// A writable disk that was left out of an image: a restored guest has an empty one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExcludedDisk {
    /// The hypervisor's name for it.
    pub name: String,
    /// Its index among the disk files of the command line.
    pub place: usize,
    /// The size that the guest sees.
    pub virtual_bytes: u64,
}

/// The names of the disks that were left out of an image, by what it says of its machine.
pub fn excluded_disks(machine: &Value) -> Vec<String> {
    let all = machine["excluded"].as_array().into_iter().flatten();
    all.filter_map(|disk| Some(disk["name"].as_str()?.to_owned())).collect()
}

/// A saved copy of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedDisk {
    /// The hypervisor's name for it.
    pub name: String,
    /// The copy.
    pub path: PathBuf,
    /// The files that it stands on.
    pub below: Vec<PathBuf>,
    /// Its format.
    pub format: String,
    /// The size that the guest sees.
    pub virtual_bytes: u64,
}

impl SavedDisk {
    /// All files that it is.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        std::iter::once(&self.path).chain(&self.below).cloned()
    }
}

/// Why a guest cannot be started again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The image's description of it.
    #[error("the image's description of its machine cannot be read: {0}")]
    Machine(#[from] serde_json::Error),
    /// The command line.
    #[error("its command line: {0}")]
    CommandLine(#[from] Unsupported),
    /// A disk of the machine has no copy.
    #[error("the image has no copy of disk '{0}'")]
    NoCopy(String),
    /// An overlay.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// RAM regions differ.
    #[error("RAM '{id}' has {planned} bytes on the command line and {saved} in the image")]
    RamDiffers {
        /// The backend's id.
        id: String,
        /// Bytes by the command line.
        planned: u64,
        /// Bytes in the image.
        saved: u64,
    },
}

/// A guest about to be started again.
#[derive(Debug)]
pub struct PlannedStart {
    /// What the image says.
    pub machine: Machine,
    /// Its new command lines.
    pub plan: RestorePlan,
    /// Its RAM files, in the order of the image's regions.
    pub regions: Vec<PlannedRegion>,
    /// The overlays that its disks run on.
    pub overlays: Vec<PathBuf>,
}

/// Plans a revival and makes its overlays. RAM files go to `ram_path`; the
/// image's regions are `regions`, by name and bytes.
///
/// # Errors
/// Where the image and its command line do not fit together; then nothing is
/// left.
pub fn plan_start(
    machine: Value,
    disks: &[SavedDisk],
    regions: &[(String, u64)],
    folder: &GuestFolder,
    ram_path: impl Fn(&str) -> PathBuf,
) -> Result<PlannedStart, StartError> {
    let machine: Machine = serde_json::from_value(machine)?;
    let places = disk_places(&machine.arguments)?.len();
    let mut overlays = HashMap::new();
    for (index, disk) in machine.disks.iter().enumerate() {
        if disk.place >= places || !disks.iter().any(|saved| saved.name == disk.name) {
            return Err(StartError::NoCopy(disk.name.clone()));
        }
        overlays.insert(disk.place, overlay_path(folder, index));
    }
    for (index, disk) in (machine.disks.len()..).zip(&machine.excluded) {
        if disk.place >= places {
            return Err(StartError::NoCopy(disk.name.clone()));
        }
        overlays.insert(disk.place, overlay_path(folder, index));
    }
    let socket = folder.file("qmp.sock");
    let (line, kind) = (&machine.arguments, &machine.machine);
    let plan = plan_restore(line, &socket, ram_path, &overlays, kind, &machine.folder)?;
    let planned = order_regions(&plan.run.regions, regions)?;
    let user = QemuUser::of(&machine.arguments)?;
    let mut made = Vec::new();
    let saved = machine.disks.iter().map(|disk| (disk.place, &disk.name, None));
    let empty = machine.excluded.iter().map(|it| (it.place, &it.name, Some(it.virtual_bytes)));
    for (place, name, empty_bytes) in saved.chain(empty) {
        let path = overlays[&place].clone();
        let saved = disks.iter().find(|saved| saved.name == *name);
        let result = match (empty_bytes, saved) {
            (Some(bytes), _) => keep_old(&path).and_then(|()| create_empty(&path, bytes)),
            (None, Some(saved)) => overlay_on(saved, &path),
            (None, None) => return Err(StartError::NoCopy(name.clone())),
        };
        let result = result.map_err(StartError::from).and_then(|()| match &user {
            Some(user) => Ok(user.give(&path, folder.root())?),
            None => Ok(()),
        });
        if let Err(error) = result {
            crate::launch::remove_files(&made);
            return Err(error);
        }
        made.push(path);
    }
    Ok(PlannedStart { machine, plan, regions: planned, overlays: made })
}

/// The overlay that disk `index` of a restored guest runs on. One that is there is kept
/// under that name with `.old` behind it, until the new guest runs.
pub fn overlay_path(folder: &GuestFolder, index: usize) -> PathBuf {
    folder.file(&format!("disk-{index}.qcow2"))
}

fn overlay_on(saved: &SavedDisk, overlay: &Path) -> Result<(), DiskError> {
    keep_old(overlay)?;
    let base = saved.path.display().to_string();
    create_overlay(overlay, &base, &saved.format, saved.virtual_bytes)
}

/// Puts an overlay that is there aside: a guest by this name before may want its disk back,
/// should the restore fail.
fn keep_old(overlay: &Path) -> Result<(), DiskError> {
    if overlay.exists() {
        std::fs::rename(overlay, overlay.with_extension("qcow2.old")).map_err(|error| {
            DiskError::File(format!("cannot rename {}", overlay.display()), error)
        })?;
    }
    Ok(())
}

/// The planned regions in the order of the saved ones.
fn order_regions(
    planned: &[PlannedRegion],
    saved: &[(String, u64)],
) -> Result<Vec<PlannedRegion>, StartError> {
    saved
        .iter()
        .map(|(id, bytes)| {
            let region = planned.iter().find(|region| region.id == *id);
            let differs =
                |planned| StartError::RamDiffers { id: id.clone(), planned, saved: *bytes };
            let region = region.ok_or_else(|| differs(0))?;
            if region.bytes != *bytes { Err(differs(region.bytes)) } else { Ok(region.clone()) }
        })
        .collect()
}
