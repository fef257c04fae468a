//! Guests that do not boot: QEMU's state of one that has booted is kept, and loaded into others.
//!
//! A guest is started as any other, with a command line and disks of its own; a moment later the
//! state of another with the same devices is loaded over what it has done until then. It comes from
//! an internal snapshot in an image that is plugged in for that time, so that neither the command
//! line nor the disks know of it. What is on the disks is not in the state: its guest has used none of
//! them, and settled (see its program) before.

use crate::guest::{DiskSpec, GuestSpec, guest_files, qemu};
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
/// Options that change nothing in the machine's state: those with a value, and those without.
const WITHOUT_STATE: [&str; 4] = ["-qmp", "-D", "-d", "-add-fd"];
const FLAGS_WITHOUT_STATE: [&str; 1] = ["-no-shutdown"];

/// The spec whose state fits this one, where one can be kept at all. It leaves out what a guest cannot
/// notice.
pub fn warm_spec(spec: &GuestSpec) -> Option<GuestSpec> {
    let is_plain = spec.accel == "tcg" && !spec.qos && !spec.defaults && spec.sample.is_none();
    if !is_plain || !spec.boots {
        return None;
    }
    let disks = spec.disks.iter().map(|disk| DiskSpec { mib: disk.mib, ..DiskSpec::default() });
    Some(GuestSpec {
        extra: with_state(&spec.extra)?,
        disks: disks.collect(),
        served: spec.served.iter().enumerate().map(empty_like).collect::<Option<_>>()?,
        run_words: Vec::new(),
        environment: Vec::new(),
        ..spec.clone()
    })
}

/// The options that change the machine's state; `None` where it is not known what one does.
fn with_state(options: &[String]) -> Option<Vec<String>> {
    let mut kept = Vec::new();
    let mut options = options.iter();
    while let Some(name) = options.next() {
        match name.as_str() {
            flag if FLAGS_WITHOUT_STATE.contains(&flag) => {}
            other if WITHOUT_STATE.contains(&other) => drop(options.next()?),
            "-machine" => kept.extend([name.clone(), options.next()?.clone()]),
            _ => return None,
        }
    }
    Some(kept)
}

/// What `--disk` says of an empty disk of the same size: a file that [`make_served`] makes.
fn empty_like((number, served): (usize, &String)) -> Option<String> {
    let (path, options) = served.split_once(',').unwrap_or((served, ""));
    let is_plain = options.split(',').all(|it| it.is_empty() || it.starts_with("cache"));
    let bytes = fs::metadata(path).ok()?.len();
    is_plain.then(|| format!("{number}-{bytes},cache=warm"))
}

/// Makes the served disks of a [`warm_spec`] in a folder, empty.
///
/// # Errors
/// Where one cannot be made.
pub fn make_served(folder: &Path, spec: &GuestSpec) -> Result<()> {
    for disk in &spec.served {
        let name = disk.split(',').next().unwrap_or_default();
        let bytes = name.rsplit('-').next().unwrap_or_default().parse().context("a size")?;
        File::create(folder.join(name))?.set_len(bytes)?;
    }
    Ok(())
}

/// The kept state that fits a spec. `boot` makes one where there is none: it boots a guest and
/// returns the path of its QMP socket.
///
/// # Errors
/// Where it cannot be made.
pub fn state_of(spec: &GuestSpec, boot: impl FnOnce() -> Result<PathBuf>) -> Result<PathBuf> {
    let (kernel, initrd) = guest_files()?;
    let mut hash = DefaultHasher::new();
    (format!("{spec:?}"), spec.kernel_words(), qemu_version()).hash(&mut hash);
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
    with_image(qmp, own, "snapshot-load").with_context(|| format!("state {}", state.display()))?;
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
