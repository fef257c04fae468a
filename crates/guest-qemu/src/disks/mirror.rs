//! Copies of a guest's disks in a QEMU at another host that waits for the guest: QEMU's own mirror jobs
//! there, over NBD.
//!
//! ```text
//!  begin    the jobs copy while the guest runs; what it writes is copied again
//!  finish   the guest stands still: the jobs copy what is left, flush it, are ready, and end
//! ```
//!
//! Each copy has what the guest sees of its disk, whatever the disk stands on. The disks themselves are
//! not changed. The journal says that there are copies, so that a command that died leaves none under way.

use super::error::DiskError;
use super::jobs::{POLL, abandon_job_until, await_job, job_state};
use super::nodes::delete_node;
use crate::discover::writable_nodes;
use crate::guest::QemuGuest;
use crate::journal::Journal;
use crate::qemu_img::create_private;
use crate::qmp::Qmp;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long the guest stands still at most until all is copied.
const READY_WITHIN: Duration = Duration::from_secs(5);
/// How long a job may take to end that is abandoned.
const ENDS_WITHIN: Duration = Duration::from_secs(20);
/// What the names of our jobs begin with.
const JOB: &str = "dewar-mirror-";

fn job(index: usize) -> String {
    format!("{JOB}{index}")
}

fn node(index: usize) -> String {
    format!("dewar-copy-{index}")
}

/// How the NBD server of the other QEMU calls a disk.
fn export(index: usize) -> String {
    format!("disk-{index}")
}

/// Whether a job of this name is one that copies a disk to another host.
pub(crate) fn is_mirror(job: &Value) -> bool {
    job["device"].as_str().is_some_and(|id| id.starts_with(JOB))
}

/// How far the copies are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MirrorProgress {
    /// Whether there was a moment for each in which nothing was left.
    pub is_ready: bool,
    /// Whether it is known for each what is left.
    pub has_begun: bool,
    /// Bytes that are still to be copied.
    pub left: u64,
    /// Bytes in all, those that were written again among them.
    pub of: u64,
}

/// Begins to copy each writable disk of a guest; the NBD server of the other QEMU is reached by these
/// sockets, one a disk.
///
/// # Errors
/// Where QEMU cannot; what was begun is to be undone by [`crate::rollback`].
pub fn begin_mirrors(guest: &mut QemuGuest, sockets: &[PathBuf]) -> Result<(), DiskError> {
    Journal { mirrors: sockets.len(), stopping: false, ..Journal::default() }
        .save(&guest.folder)?;
    for (index, socket) in sockets.iter().enumerate() {
        let server = json!({"type": "unix", "path": socket});
        let copy = json!({
            "driver": "nbd", "node-name": node(index), "server": server, "export": export(index),
        });
        guest.qmp.execute("blockdev-add", copy)?;
        let mirror = json!({
            "job-id": job(index), "device": guest.found.disks[index].top, "target": node(index),
            "sync": "full", "auto-dismiss": false, "on-target-error": "report",
        });
        guest.qmp.execute("blockdev-mirror", mirror)?;
    }
    Ok(())
}

/// How far they are.
///
/// # Errors
/// Where one has failed.
pub fn mirror_progress(guest: &mut QemuGuest, mirrors: usize) -> Result<MirrorProgress, DiskError> {
    progress(&mut guest.qmp, mirrors)
}

fn progress(qmp: &mut Qmp, mirrors: usize) -> Result<MirrorProgress, DiskError> {
    let jobs = qmp.execute("query-block-jobs", json!({}))?;
    let mut all = MirrorProgress { is_ready: true, has_begun: true, left: 0, of: 0 };
    for index in 0..mirrors {
        let is_it = |it: &&Value| it["device"] == job(index) && it["status"] != "concluded";
        let Some(found) = jobs.as_array().into_iter().flatten().find(is_it) else {
            let state = job_state(qmp, &job(index))?;
            let why = state.and_then(|state| state.error);
            return Err(DiskError::Job(job(index), why.unwrap_or_else(|| "it ended".to_owned())));
        };
        let number = |name: &str| found[name].as_u64().unwrap_or(0);
        all.is_ready &= found["ready"] == true;
        all.has_begun &= found["ready"] == true || number("len") > 0;
        all.left += number("len").saturating_sub(number("offset"));
        all.of += number("len");
    }
    Ok(all)
}

/// Lets the jobs copy what is left and end; the guest stands still.
pub(crate) fn finish(qmp: &mut Qmp, mirrors: usize) -> Result<(), DiskError> {
    if mirrors == 0 {
        // Nothing is asked in the pause.
        return Ok(());
    }
    // A job is ready when there was a moment in which nothing was left: while the guest writes, and the
    // other host is far, there may be none. Cancelled before, it ends in the middle of its copy.
    let deadline = Instant::now() + READY_WITHIN;
    while !progress(qmp, mirrors)?.is_ready {
        if Instant::now() > deadline {
            return Err(DiskError::Job(job(0), "the rest of a disk takes too long".to_owned()));
        }
        std::thread::sleep(POLL);
    }
    for index in 0..mirrors {
        // In this state it means that the copy is to be whole as of now, and not to take the disk's place.
        qmp.execute("block-job-cancel", json!({"device": job(index)}))?;
    }
    for index in 0..mirrors {
        await_job(qmp, &job(index))?;
        delete_node(qmp, &node(index))?;
    }
    Ok(())
}

/// Ends them as they are.
pub(crate) fn abandon(qmp: &mut Qmp, mirrors: usize) -> Result<(), DiskError> {
    for index in 0..mirrors {
        let deadline = Instant::now() + ENDS_WITHIN;
        abandon_job_until(qmp, &job(index), deadline)?;
        delete_node(qmp, &node(index))?;
    }
    Ok(())
}

/// Lets a QEMU that waits for its guest take copies of disks, into these files of its own, at a socket.
///
/// # Errors
/// Where QEMU cannot, or has none of the files open.
pub fn export_disks(qmp: &mut Qmp, socket: &Path, files: &[PathBuf]) -> Result<(), DiskError> {
    let nodes = writable_nodes(qmp)?;
    let address = json!({"type": "unix", "data": {"path": socket}});
    qmp.execute("nbd-server-start", json!({"addr": address}))?;
    for (index, file) in files.iter().enumerate() {
        let is_it = |(path, _): &&(String, String)| {
            std::fs::canonicalize(path).ok() == std::fs::canonicalize(file).ok()
        };
        let (_, node) = nodes.iter().find(is_it).ok_or_else(|| {
            DiskError::Job("export".to_owned(), format!("{} is no disk of it", file.display()))
        })?;
        let export = json!({
            "type": "nbd", "id": export(index), "name": export(index), "node-name": node,
            "writable": true,
        });
        qmp.execute("block-export-add", export)?;
    }
    Ok(())
}

/// Ends that: the files are the guest's alone.
///
/// # Errors
/// Where QEMU does not answer.
pub fn end_exports(qmp: &mut Qmp) -> Result<(), DiskError> {
    qmp.execute("nbd-server-stop", json!({}))?;
    // Until then a connection may write.
    while qmp.execute("query-block-exports", json!({}))?.as_array().is_some_and(|it| !it.is_empty())
    {
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// Makes an empty disk of that format and size, private to its owner.
///
/// # Errors
/// Where the file exists, or there is no room.
pub fn make_disk(path: &Path, format: &str, virtual_bytes: u64) -> Result<(), DiskError> {
    let file = create_private(path)?;
    let made = match format {
        "qcow2" => super::fill_empty(file, virtual_bytes),
        _ => file
            .set_len(virtual_bytes)
            .map_err(|error| DiskError::File(format!("cannot make {}", path.display()), error)),
    };
    made.inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
}
