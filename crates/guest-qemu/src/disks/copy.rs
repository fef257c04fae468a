//! Copying disks that stand still.

use super::error::DiskError;
use super::jobs::{abandon_job, await_job};
use super::nodes::{absolute, delete_node, make_qcow2};
use crate::bitmaps;
use crate::discover::Disk;
use crate::qemu_img::{self, STDIN, create_private};
use crate::qmp::Qmp;
use dewar_guest::DiskPlace;
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;

fn copy_node(index: usize) -> String {
    format!("dewar-copy-{index}")
}

fn backup_job(index: usize) -> String {
    format!("dewar-backup-{index}")
}

/// Copies a frozen disk to a new qcow2 file, sparsely, and to disk; where the
/// file stands on another, only what was written since image `since`.
pub(crate) fn copy(
    qmp: &mut Qmp,
    disk: &Disk,
    index: usize,
    target: &DiskPlace,
    since: Option<&str>,
) -> Result<(), DiskError> {
    let since = since.zip(target.below.as_deref());
    let path = &target.path;
    let below = since.map(|(_, below)| (below, "qcow2"));
    let file = make_qcow2(qmp, path, below, disk.info.virtual_bytes, false)?;
    let node = copy_node(index);
    let mut arguments = json!({
        "driver": "qcow2", "node-name": node, "file": {"driver": "file", "filename": file},
    });
    if since.is_some() {
        // Zeros must be noted: they hide what the file below has there.
        arguments["backing"] = Value::Null;
    } else {
        arguments["discard"] = "unmap".into();
        arguments["detect-zeroes"] = "unmap".into();
    }
    qmp.execute("blockdev-add", arguments)?;
    let job = backup_job(index);
    let mut arguments = json!({
        "job-id": job, "device": disk.node, "target": node, "sync": "full",
        "auto-dismiss": false,
    });
    if let Some((image, _)) = since {
        arguments["sync"] = "bitmap".into();
        arguments["bitmap"] = bitmaps::name(image).into();
        arguments["bitmap-mode"] = "never".into();
    }
    qmp.execute("blockdev-backup", arguments)?;
    await_job(qmp, &job)?;
    qmp.execute("blockdev-del", json!({"node-name": node}))?;
    sync(path)
}

/// Copies a disk of a guest that is paused and has given its files up.
pub(crate) fn copy_offline(disk: &Disk, target: &Path, cwd: &Path) -> Result<(), DiskError> {
    let made = create_private(target)?;
    let source = absolute(&disk.file, cwd);
    let mut line = vec!["convert", "-q", "-f", &disk.format, "-O", "qcow2", &source, STDIN];
    if disk.is_served {
        // The server has it in use still. Nothing changes as long as the guest stands still, which is looked at afterwards.
        line.insert(1, "-U");
    }
    qemu_img::run(Some(made), &line)?;
    sync(target)
}

fn sync(target: &Path) -> Result<(), DiskError> {
    File::open(target)
        .and_then(|file| file.sync_all())
        .map_err(|error| DiskError::File(format!("cannot sync {}", target.display()), error))
}

/// Ends a copy that nobody waits for any more.
pub(crate) fn abandon_copy(qmp: &mut Qmp, index: usize) -> Result<(), DiskError> {
    abandon_job(qmp, &backup_job(index))?;
    delete_node(qmp, &copy_node(index))
}
