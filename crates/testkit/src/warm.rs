//! Guests that do not boot: QEMU's state of one that has booted is kept, and loaded into others.
//!
//! A guest is started as any other, with a command line and disks of its own; a moment later the
//! state of another with the same devices is loaded over what it has done until then. It comes from
//! an internal snapshot in an image that is plugged in for that time, so that neither the command
//! line nor the disks know of it. An empty disk is as good as any other. One with a file system is
//! not, since the state has blocks of it in its cache.

use crate::guest::{GuestSpec, guest_files, qemu};
use crate::slow_disk::run;
use anyhow::{Context, Result, bail, ensure};
use dewar_guest_qemu::Qmp;
use rustix::fs::{FlockOperation, flock};
use serde_json::json;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The name of the plugged image, and of the snapshot in it.
const NODE: &str = "warm";
/// Options that change nothing in the machine's state.
const WITHOUT_STATE: [&str; 3] = ["-qmp", "-D", "-d"];

/// The spec whose state fits this one, where one can be kept at all.
pub fn warm_spec(spec: &GuestSpec) -> Option<GuestSpec> {
    let mut kept = Vec::new();
    for option in spec.extra.chunks(2) {
        match option[0].as_str() {
            "-machine" => kept.extend_from_slice(option),
            name if WITHOUT_STATE.contains(&name) => {}
            _ => return None,
        }
    }
    let has_files = spec.disks.iter().any(|disk| disk.file_system);
    let is_plain = spec.accel == "tcg"
        && !spec.qos
        && !spec.defaults
        && spec.sample.is_none()
        && spec.served.is_empty();
    (is_plain && !has_files).then(|| GuestSpec { extra: kept, ..spec.clone() })
}

/// The kept state that fits a spec. `boot` makes one where there is none: it boots a guest and
/// returns the path of its QMP socket.
///
/// # Errors
/// Where it cannot be made.
pub fn state_of(spec: &GuestSpec, boot: impl FnOnce() -> Result<PathBuf>) -> Result<PathBuf> {
    let (kernel, initrd) = guest_files()?;
    let mut hash = DefaultHasher::new();
    (format!("{spec:?}"), qemu_version()).hash(&mut hash);
    for file in [&kernel, &initrd] {
        let file = fs::metadata(file)?;
        (file.len(), file.modified()?).hash(&mut hash);
    }
    let folder = kernel.parent().context("the guest's folder")?.join("warm");
    fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{:016x}.qcow2", hash.finish()));
    // Of several that want it one boots.
    let lock = File::create(path.with_extension("lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    if !path.exists() {
        let part = path.with_extension("part");
        run(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&part).arg("1M"))?;
        with_image(&boot()?, &part, "snapshot-save")?;
        fs::rename(part, &path)?;
    }
    Ok(path)
}

/// Loads a kept state into the guest whose QMP socket this is, from a copy of its own.
///
/// # Errors
/// Where it does not fit.
pub fn load(qmp: &Path, state: &Path, own: &Path) -> Result<()> {
    // Loading it writes to it.
    fs::copy(state, own)?;
    with_image(qmp, own, "snapshot-load")?;
    Ok(fs::remove_file(own)?)
}

fn with_image(socket: &Path, image: &Path, command: &str) -> Result<()> {
    let mut qmp = Qmp::connect(socket)?;
    let file = json!({"driver": "file", "filename": image});
    let node = json!({"driver": "qcow2", "node-name": NODE, "file": file});
    qmp.execute("blockdev-add", node)?;
    let job = json!({"job-id": NODE, "tag": NODE, "vmstate": NODE, "devices": [NODE]});
    qmp.execute(command, job)?;
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let jobs = qmp.execute("query-jobs", json!({}))?;
        let job = jobs.as_array().and_then(|it| it.iter().find(|it| it["id"] == NODE));
        let job = job.with_context(|| format!("{command}: its job is gone"))?;
        if job["status"] == "concluded" {
            ensure!(job["error"].is_null(), "{command}: {}", job["error"]);
            break;
        }
        if Instant::now() > deadline {
            bail!("{command} takes too long: {job}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    qmp.execute("job-dismiss", json!({"id": NODE}))?;
    qmp.execute("blockdev-del", json!({"node-name": NODE}))?;
    Ok(())
}

fn qemu_version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let output = Command::new(qemu()).arg("--version").output();
        output.map(|it| String::from_utf8_lossy(&it.stdout).into_owned()).unwrap_or_default()
    })
}
