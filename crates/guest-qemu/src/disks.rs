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
//! while the journal is written. [`settle`] goes from any of these states to
//! the end; it is what the ordinary way and every recovery call.

mod copy;

pub(crate) use copy::{abandon_copy, copy, copy_offline};

use crate::bitmaps;
use crate::discover::Disk;
use crate::journal::{Current, Journal, JournaledDisk};
use crate::qemu_img::{self, STDIN, create_private};
use crate::qmp::{Qmp, QmpError};
use dewar_registry::{GuestFolder, RegistryError};
use serde_json::{Value, json};
use std::fs::{self, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Marks the fd sets that are ours.
const OPAQUE: &str = "dewar";
/// The node and the job that make a file; one is made at a time.
const MAKING: &str = "dewar-new";
const POLL: Duration = Duration::from_millis(2);

/// What can go wrong with a disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The journal.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A file.
    #[error("{0}: {1}")]
    File(String, std::io::Error),
    /// `qemu-img`.
    #[error("qemu-img {0}")]
    Tool(String),
    /// An overlay is not newer than its disk any more.
    #[error(
        "{} was written by others since a checkpoint was cut short; what its guest had written then \
         is in {}, and cannot be put into it any more", own.display(), overlay.display()
    )]
    Outdated {
        /// The disk's own file.
        own: PathBuf,
        /// The overlay's file.
        overlay: PathBuf,
    },
    /// A job in QEMU.
    #[error("QEMU's job '{0}' failed: {1}")]
    Job(String, String),
}

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

/// Has QEMU make an empty qcow2 file, over a file of that name and format; returns the name
/// under which QEMU opens it, as [`hand_over`]. Starting `qemu-img` would take longer.
fn make_qcow2(
    qmp: &mut Qmp,
    path: &Path,
    below: Option<(&str, &str)>,
    virtual_bytes: u64,
    direct: bool,
) -> Result<String, DiskError> {
    create_private(path)?;
    let file = hand_over(qmp, path, direct)?;
    let node = json!({"driver": "file", "node-name": MAKING, "filename": file});
    qmp.execute("blockdev-add", node)?;
    let mut options = json!({"driver": "qcow2", "file": MAKING, "size": virtual_bytes});
    if let Some((name, format)) = below {
        options["backing-file"] = name.into();
        options["backing-fmt"] = format.into();
    }
    qmp.execute("blockdev-create", json!({"job-id": MAKING, "options": options}))?;
    await_job(qmp, MAKING)?;
    qmp.execute("blockdev-del", json!({"node-name": MAKING}))?;
    Ok(file)
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
    let file = create_private(path)?;
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
pub(crate) fn settle(
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
pub(crate) fn settle_offline(
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
        qemu_img::run(None, &["commit", "-q", "-f", "qcow2", &path])?;
        journal.disks[index].current = Current::Own;
        journal.save(folder)?;
    }
    remove_file(&overlay)
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

/// Gives QEMU a file to open, whatever user it runs as and whatever it can
/// see; returns the name under which it opens it. `direct` says that it will be
/// opened past the page cache.
fn hand_over(qmp: &mut Qmp, path: &Path, direct: bool) -> Result<String, DiskError> {
    let open = |write: bool, flags: i32| {
        OpenOptions::new()
            .read(true)
            .write(write)
            .custom_flags(flags)
            .open(path)
            .map_err(|error| DiskError::File(format!("cannot open {}", path.display()), error))
    };
    let first = open(true, 0)?;
    let set = qmp.execute_with_fd("add-fd", json!({"opaque": OPAQUE}), first.as_fd())?;
    let set = &set["fdset-id"];
    // QEMU looks for a descriptor with the access that it wants at the time;
    // from 9.1 on its O_DIRECT must fit too.
    let mut more = vec![open(false, 0)?];
    if direct {
        let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
        more.extend([open(true, flags)?, open(false, flags)?]);
    }
    for file in more {
        let arguments = json!({"fdset-id": set, "opaque": OPAQUE});
        qmp.execute_with_fd("add-fd", arguments, file.as_fd())?;
    }
    Ok(format!("/dev/fdset/{set}"))
}

struct JobState {
    status: String,
    error: Option<String>,
}

fn job_state(qmp: &mut Qmp, id: &str) -> Result<Option<JobState>, DiskError> {
    let jobs = qmp.execute("query-jobs", json!({}))?;
    Ok(jobs.as_array().into_iter().flatten().find(|job| job["id"] == id).map(|job| JobState {
        status: job["status"].as_str().unwrap_or_default().to_owned(),
        error: job["error"].as_str().map(str::to_owned),
    }))
}

/// Waits for a job of ours to conclude, and dismisses it. One that somebody else dismissed
/// may have failed.
fn await_job(qmp: &mut Qmp, id: &str) -> Result<(), DiskError> {
    let failed = |why: String| DiskError::Job(id.to_owned(), why);
    loop {
        let Some(state) = job_state(qmp, id)? else {
            return Err(failed("somebody else dismissed it".to_owned()));
        };
        if state.status == "concluded" {
            qmp.execute("job-dismiss", json!({"id": id}))?;
            return state.error.map_or(Ok(()), |error| Err(failed(error)));
        }
        std::thread::sleep(POLL);
    }
}

/// Ends a job, if there is one.
fn abandon_job(qmp: &mut Qmp, id: &str) -> Result<(), DiskError> {
    let mut asked = false;
    while let Some(state) = job_state(qmp, id)? {
        match state.status.as_str() {
            "concluded" => drop(qmp.execute("job-dismiss", json!({"id": id}))?),
            _ if !asked => {
                asked = true;
                // Refused where it concludes this very moment.
                let _ = qmp.execute("job-cancel", json!({"id": id}));
            }
            _ => std::thread::sleep(POLL),
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

fn delete_node(qmp: &mut Qmp, node: &str) -> Result<(), DiskError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}))?;
    if nodes.as_array().into_iter().flatten().any(|it| it["node-name"] == node) {
        qmp.execute("blockdev-del", json!({"node-name": node}))?;
    }
    Ok(())
}

fn absolute(file: &str, cwd: &Path) -> String {
    if file.starts_with("json:") || file.contains("://") {
        file.to_owned()
    } else {
        cwd.join(file).display().to_string()
    }
}

fn remove_file(path: &Path) -> Result<(), DiskError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(DiskError::File(format!("cannot remove {}", path.display()), error))
        }
        _ => Ok(()),
    }
}
