//! What CRIU cannot take is found before anything is frozen.

use crate::container::Container;
use crate::error::OciError;
use crate::network::lost_interfaces;
use crate::overlay::Overlay;
use crate::processes::{Processes, field, tracer};
use crate::runtime::find_program;
use crate::strays::{clean, has_code};
use dewar_kernel::{Pid, close_left_userfaultfds_of};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The oldest CRIU that knows kernels of today.
const OLDEST_CRIU: u32 = 4;

/// After how long it is looked again at a process that seems to be from outside.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What a container, and the host, must not lack.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Preconditions {
    /// What is missing, and what to do about each.
    pub missing: Vec<String>,
}

impl Preconditions {
    /// Looks at a container.
    ///
    /// # Errors
    /// Where it cannot be looked at.
    pub fn of(container: &Container) -> Result<Self, OciError> {
        let process = container.process()?;
        let config = container.config()?;
        let processes = Processes::of(process.pid)?;
        let mut missing = Self::of_host().missing;
        if let Some(podman) = &container.podman {
            missing.extend(podman.missing(&container.id)?);
        }
        missing.extend(terminal(&config));
        missing.extend(lost_interfaces(process.pid, &config).into_iter().map(|name| {
            format!(
                "nobody would make its network interface {name} at a restore: give its network namespace by \
                 path, or hooks that make it"
            )
        }));
        for pid in processes.pids() {
            // Where that cannot be it is told with what is open.
            let _ = close_left_userfaultfds_of(Pid(pid));
        }
        missing.extend(processes.pids().flat_map(|pid| files(pid, process.pid)));
        let strangers = processes.pids().filter(|pid| is_from_outside(*pid, process.pid));
        missing.extend(strangers.map(|pid| {
            let program = program_of(pid);
            format!("{program} was started in it from outside ('exec'), and CRIU cannot save that: end it")
        }));
        let overlay = Overlay::mounted_on(&container.rootfs(&config))?;
        if overlay.as_ref().is_some_and(|overlay| !overlay.has_whole_paths()) {
            missing.push(
                "the overlay of its root file system was mounted with paths that do not begin at the root: mount \
                 it with whole ones"
                    .to_owned(),
            );
        }
        if overlay.is_none() && container.podman.is_some() {
            missing.push(
                "its root file system is no overlay of the kernel's: what it wrote there cannot be told".to_owned(),
            );
        }
        if processes.pids().any(has_code) {
            // One that somebody else killed.
            clean(process);
        }
        missing.extend(processes.pids().filter(|pid| has_code(*pid)).map(|pid| {
            let program = program_of(pid);
            match tracer(pid) != 0 {
                true => format!("a CRIU is at work on {program}: try again when it is done"),
                false => format!("a CRIU that was killed left code in {program}: start it anew"),
            }
        }));
        missing.sort();
        missing.dedup();
        Ok(Self { missing })
    }

    /// What the host lacks for any container.
    pub fn of_host() -> Self {
        let mut missing = Vec::new();
        match criu_version() {
            None => missing.push("criu is not installed: install it, version 4 or later".to_owned()),
            Some((major, text)) if major < OLDEST_CRIU => missing.push(format!(
                "CRIU {text} is too old for kernels of today: install version {OLDEST_CRIU} or later"
            )),
            Some(_) => {}
        }
        if find_program(Path::new("iptables-restore")).is_none() {
            missing.push("iptables is not installed: CRIU locks networks with it".to_owned());
        }
        for (program, package) in [("ip", "iproute2"), ("nsenter", "util-linux")] {
            if find_program(Path::new(program)).is_none() {
                missing.push(format!(
                    "{program} is not installed ({package}): networks are closed with it"
                ));
            }
        }
        if !rustix::process::geteuid().is_root() {
            missing.push("only root may save and restore containers".to_owned());
        }
        Self { missing }
    }

    /// That nothing is missing.
    ///
    /// # Errors
    /// [`OciError::Unsupported`] where something is.
    pub fn require(self, container: &Container) -> Result<(), OciError> {
        if self.missing.is_empty() {
            return Ok(());
        }
        Err(OciError::Unsupported { id: container.id.clone(), reasons: self.missing })
    }
}

/// CRIU's version: its first number, and all of it.
pub(crate) fn criu_version() -> Option<(u32, String)> {
    let program = find_program(Path::new("criu"))?;
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.lines().find_map(|line| line.strip_prefix("Version:"))?.trim().to_owned();
    Some((version.split('.').next()?.parse().ok()?, version))
}

fn terminal(config: &Value) -> Option<String> {
    let has_one = config["process"]["terminal"] == Value::Bool(true);
    has_one.then(|| {
        "it has a terminal, whose other end lies outside it: start it without (\"terminal\": false)".to_owned()
    })
}

/// Whether a process does not descend from a first one. While processes end the chain of parents may be cut for a
/// moment: it is looked at again.
fn is_from_outside(pid: i32, first: i32) -> bool {
    let is_so = || field(pid, "PPid:").is_some() && !is_below(pid, first);
    is_so() && {
        std::thread::sleep(LOOK_AGAIN);
        is_so()
    }
}

/// Whether a process descends from a first one.
fn is_below(pid: i32, first: i32) -> bool {
    let parent = |pid: &i32| field(*pid, "PPid:").map(|it| it[0]).filter(|it| *it > 1);
    std::iter::successors(Some(pid), parent).any(|it| it == first)
}

fn program_of(pid: i32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

/// The files that a process has open and that cannot be saved.
fn files(pid: i32, first: i32) -> Vec<String> {
    let program = program_of(pid);
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mounts = mounts_of(first);
    let mut found = Vec::new();
    for entry in open {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let number = entry.file_name().to_string_lossy().into_owned();
        let target = target.to_string_lossy().into_owned();
        let why = match target.as_str() {
            "anon_inode:[io_uring]" => "io_uring: switch it off in the program",
            "anon_inode:[userfaultfd]" => "a userfaultfd",
            "anon_inode:bpf-map" | "anon_inode:bpf-prog" | "anon_inode:bpf-link" => "BPF",
            path if path.starts_with('/') && is_outside(pid, &number, &mounts) => {
                "a file outside its own mounts: start it with standard output and standard error \
                 at /dev/null, a pipe or a file inside"
            }
            _ => continue,
        };
        found.push(format!("{program} has open {target}, {why}"));
    }
    found
}

/// The numbers of the mounts that a process sees (proc_pid_mountinfo(5)).
fn mounts_of(pid: i32) -> Vec<String> {
    let text = fs::read(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

/// Whether an open file lies on a mount that the container does not see. /dev/null of the host CRIU finds by itself.
fn is_outside(pid: i32, number: &str, mounts: &[String]) -> bool {
    let path = format!("/proc/{pid}/fd/{number}");
    let is_regular = fs::metadata(&path).is_ok_and(|data| data.is_file() || data.is_dir());
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim);
    is_regular && mount.is_some_and(|mount| !mounts.iter().any(|it| it == mount))
}
