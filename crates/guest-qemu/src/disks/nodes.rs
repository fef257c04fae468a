//! Files that QEMU opens, and makes, for us.

use super::error::DiskError;
use super::jobs::await_job;
use crate::qemu_img::create_private;
use crate::qmp::Qmp;
use serde_json::json;
use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The node and the job that make a file; one is made at a time.
pub(super) const MAKING: &str = "dewar-new";
/// Marks the fd sets that are ours.
pub(super) const OPAQUE: &str = "dewar";

/// Has QEMU make an empty qcow2 file, over a file of that name and format; returns the name
/// under which QEMU opens it, as [`hand_over`]. Starting `qemu-img` would take longer.
pub(super) fn make_qcow2(
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

/// Gives QEMU a file to open, whatever user it runs as and whatever it can
/// see; returns the name under which it opens it. `direct` says that it will be
/// opened past the page cache.
pub(super) fn hand_over(qmp: &mut Qmp, path: &Path, direct: bool) -> Result<String, DiskError> {
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

pub(super) fn delete_node(qmp: &mut Qmp, node: &str) -> Result<(), DiskError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}))?;
    if nodes.as_array().into_iter().flatten().any(|it| it["node-name"] == node) {
        qmp.execute("blockdev-del", json!({"node-name": node}))?;
    }
    Ok(())
}

pub(super) fn absolute(file: &str, cwd: &Path) -> String {
    if file.starts_with("json:") || file.contains("://") {
        file.to_owned()
    } else {
        cwd.join(file).display().to_string()
    }
}
