//! Freezing disks in the pause and copying them after it.
//!
//! Before the pause an empty qcow2 overlay per disk is added to QEMU. In the
//! pause one transaction puts the overlays on top: the disks below stand
//! still. Afterwards, running, each disk is copied, then its overlay is
//! committed back into it, and the guest's own file is the active one again.
//!
//! The commit ends in three steps, so that at every instant it is known, on
//! disk, which file is the newest:
//!
//! ```text
//!   overlay active --block-commit--> READY --job-complete--> PENDING --job-finalize--> own file active
//!      journal: overlay                          |  journal: own   |
//! ```
//!
//! In PENDING QEMU has written everything back and flushed it, and holds the
//! guest's requests to this disk until `job-finalize`: neither file changes
//! while the journal is written. [`make_current`] goes from any of these states to
//! the end; it is what the ordinary way and every recovery call.

mod copy;
mod error;
mod jobs;
pub(crate) mod mirror;
mod nodes;

pub(crate) use copy::{abandon_copy, copy, copy_offline};
pub use error::DiskError;

use crate::bitmaps;
use crate::discover::Disk;
use crate::journal::{Current, Journal, JournaledDisk};
use crate::qemu_img::{self, STDIN, create_private};
use crate::qmp::Qmp;
use dewar_registry::GuestFolder;
use jobs::{POLL, abandon_job, job_state};
use nodes::{MAKING, OPAQUE, absolute, delete_node, make_qcow2};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long the disk of a QEMU that ended may be in use by others.
const FREE_WITHIN: Duration = Duration::from_secs(10);

pub(crate) fn overlay_node(index: usize) -> String {
    format!("dewar-overlay-{index}")
}

/// Where a disk's overlay goes: beside the disk, where the guest's writes
/// have their room anyway; into the guest's folder where the disk is no file.
pub(crate) fn overlay_path(disk: &Disk, index: usize, cwd: &Path, folder: &GuestFolder) -> PathBuf {
    let own = cwd.join(&disk.file);
    if own.is_file() {
        let mut name = own.into_os_string();
        name.push(".dewar-overlay");
        PathBuf::from(name)
    } else {
        folder.file(&format!("overlay-{index}.qcow2"))
    }
}

/// Makes a disk's overlay and adds it to QEMU, unused.
pub(crate) fn prepare(
    qmp: &mut Qmp,
    disk: &Disk,
    index: usize,
    overlay: &Path,
    cwd: &Path,
) -> Result<(), DiskError> {
    let own = absolute(&disk.file, cwd);
    let below = Some((own.as_str(), disk.format.as_str()));
    let file = make_qcow2(qmp, overlay, below, disk.info.virtual_bytes, disk.direct)?;
    let arguments = json!({
        "driver": "qcow2",
        "node-name": overlay_node(index),
        "backing": null,
        "discard": "unmap",
        "cache": {"direct": disk.direct},
        "file": {"driver": "file", "filename": file, "cache": {"direct": disk.direct}},
    });
    qmp.execute("blockdev-add", arguments)?;
    Ok(())
}

/// Ends the making of a file that nobody waits for any more.
pub(crate) fn abandon_making(qmp: &mut Qmp) -> Result<(), DiskError> {
    abandon_job(qmp, MAKING)?;
    delete_node(qmp, MAKING)
}

/// Makes an empty qcow2 file over `base`, of a guest that has no QEMU yet.
///
/// # Errors
/// Where the file exists, or `qemu-img` fails.
pub fn create_overlay(
    overlay: &Path,
    base: &str,
    base_format: &str,
    virtual_bytes: u64,
) -> Result<(), DiskError> {
    let file = create_private(overlay)?;
    let size = virtual_bytes.to_string();
    let line = ["create", "-q", "-u", "-f", "qcow2", "-b", base, "-F", base_format, STDIN, &size];
    qemu_img::run(Some(file), &line)
}

/// Makes an empty qcow2 file over nothing.
pub(crate) fn create_empty(path: &Path, virtual_bytes: u64) -> Result<(), DiskError> {
    fill_empty(create_private(path)?, virtual_bytes)
}

fn fill_empty(file: fs::File, virtual_bytes: u64) -> Result<(), DiskError> {
    let size = virtual_bytes.to_string();
    qemu_img::run(Some(file), &["create", "-q", "-f", "qcow2", STDIN, &size])
}

/// The transaction's part that puts the overlays on top, and begins to track
/// what comes to the disks below under the name of `image`.
pub(crate) fn snapshot_actions(journal: &Journal, image: &str) -> Value {
    let snapshot = |index, node: &str| {
        let data = json!({"node": node, "overlay": overlay_node(index)});
        json!({"type": "blockdev-snapshot", "data": data})
    };
    journal
        .disks
        .iter()
        .enumerate()
        .flat_map(|(index, disk)| {
            [bitmaps::begin_action(&disk.node, image), snapshot(index, &disk.node)]
        })
        .collect()
}

/// Brings a disk from wherever it is to its own file, and removes the overlay.
pub(crate) fn make_current(
    qmp: &mut Qmp,
    folder: &GuestFolder,
    journal: &mut Journal,
    index: usize,
) -> Result<(), DiskError> {
    let overlay = overlay_node(index);
    let job = format!("dewar-commit-{index}");
    let mut begun = false;
    let mut asked = false;
    let mut failure = None;
    let mut unnoted = None;
    loop {
        let state = job_state(qmp, &job)?;
        match state.as_ref().map(|state| state.status.as_str()) {
            None if failure.is_none() && holds_writes(qmp, &overlay, &journal.disks[index])? => {
                if journal.disks[index].kept.take().is_some() {
                    // It is written from now on.
                    journal.save(folder)?;
                }
                let root = journal.disks[index].top.as_ref().unwrap_or(&overlay);
                let arguments = json!({
                    "job-id": job, "device": root, "top-node": overlay,
                    "base-node": journal.disks[index].node,
                    "auto-finalize": false, "auto-dismiss": false,
                });
                qmp.execute("block-commit", arguments)?;
                (begun, asked) = (true, false);
            }
            None => break,
            Some("ready") if !asked => {
                qmp.execute("job-complete", json!({"id": job}))?;
                asked = true;
            }
            Some("pending") => {
                journal.disks[index].current = Current::Own;
                let ending = match journal.save(folder) {
                    Ok(()) => "job-finalize",
                    // The guest must not wait for room on our disk. It goes on with the
                    // overlay, and the next command tries again.
                    Err(error) => {
                        unnoted = Some(error);
                        "job-cancel"
                    }
                };
                qmp.execute(ending, json!({"id": job}))?;
            }
            Some("concluded") => {
                let error = state.and_then(|state| state.error);
                if error.is_some() {
                    // The overlay is still the active file. A command that finds the job later
                    // notes it, if we cannot.
                    journal.disks[index].current = Current::Overlay;
                    let noted = journal.save(folder);
                    if unnoted.is_none() {
                        noted?;
                    }
                }
                qmp.execute("job-dismiss", json!({"id": job}))?;
                if let Some(why) = unnoted.take() {
                    return Err(why.into());
                }
                // What a job failed of that somebody began before us may be over.
                failure = error.filter(|_| begun);
            }
            Some(_) => std::thread::sleep(POLL),
        }
    }
    if let Some(error) = failure {
        return Err(DiskError::Job(job, error));
    }
    delete_node(qmp, &overlay)?;
    remove_file(&journal.disks[index].overlay)
}

/// With QEMU gone: writes the overlay back into the guest's own file.
pub(crate) fn make_current_offline(
    folder: &GuestFolder,
    journal: &mut Journal,
    index: usize,
) -> Result<(), DiskError> {
    let JournaledDisk { overlay, current, kept, .. } = journal.disks[index].clone();
    // It is used once the guest is about to be stopped; before, it may be half made.
    let used = journal.stopping && fs::metadata(&overlay).is_ok_and(|data| data.len() > 0);
    if current == Current::Overlay && used {
        if let Some(kept) = kept {
            if !kept.is_as_it_was() {
                return Err(DiskError::Outdated { own: kept.path, overlay });
            }
            journal.disks[index].kept = None;
            journal.save(folder)?;
        }
        let path = overlay.display().to_string();
        commit_when_free(&path)?;
        journal.disks[index].current = Current::Own;
        journal.save(folder)?;
    }
    remove_file(&overlay)
}

/// Writes an overlay back. Who served the disk to the QEMU that ended may be ending, too, and have it in use for a moment.
fn commit_when_free(overlay: &str) -> Result<(), DiskError> {
    let deadline = Instant::now() + FREE_WITHIN;
    loop {
        match qemu_img::run(None, &["commit", "-q", "-f", "qcow2", overlay]) {
            Err(DiskError::Tool(why)) if why.contains(" lock") && Instant::now() < deadline => {
                std::thread::sleep(POLL);
            }
            result => return result,
        }
    }
}

/// Takes back the files that we gave to QEMU and it no longer uses.
pub(crate) fn release_files(qmp: &mut Qmp) -> Result<(), DiskError> {
    let sets = qmp.execute("query-fdsets", json!({}))?;
    for set in sets.as_array().into_iter().flatten() {
        let ours = |fd: &Value| fd["opaque"].as_str() == Some(OPAQUE);
        if set["fds"].as_array().is_some_and(|fds| fds.iter().any(ours)) {
            qmp.execute("remove-fd", json!({"fdset-id": set["fdset-id"]}))?;
        }
    }
    Ok(())
}

/// Whether an overlay has what its disk has not: while a device is attached to it, and
/// also when that was unplugged, if the overlay was put on top and not written back.
fn holds_writes(qmp: &mut Qmp, node: &str, disk: &JournaledDisk) -> Result<bool, DiskError> {
    let blocks = qmp.execute("query-block", json!({}))?;
    let mut devices = blocks.as_array().into_iter().flatten();
    if devices.any(|device| device["inserted"]["node-name"] == node) {
        return Ok(true);
    }
    // Not flat: then all would be of depth 0.
    let nodes = qmp.execute("query-named-block-nodes", json!({}))?;
    let found = nodes.as_array().into_iter().flatten().find(|it| it["node-name"] == node);
    let was_put_on_top = found.is_some_and(|it| it["backing_file_depth"].as_u64() > Some(0));
    Ok(was_put_on_top && disk.current == Current::Overlay)
}

fn remove_file(path: &Path) -> Result<(), DiskError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(DiskError::File(format!("cannot remove {}", path.display()), error))
        }
        _ => Ok(()),
    }
}
