//! A second host for containers on this machine: what a runtime knows, and its control groups, are apart from the first's.

use crate::container::RunningContainer;
use crate::lab::Lab;
use anyhow::{Context, Result, ensure};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

/// The runtime of a second host, for a container of the first. Dropped, its control groups are removed.
#[derive(Debug)]
pub struct SecondRuntime {
    via: PathBuf,
    groups: Vec<PathBuf>,
}

impl SecondRuntime {
    /// Makes one.
    ///
    /// # Errors
    /// Where something of it cannot be made.
    pub fn new(host: &Lab, container: &RunningContainer) -> Result<Self> {
        let state = container.state.display();
        let line = format!("exec {} mount -t tmpfs none {state}", host.via());
        ensure!(Command::new("sh").args(["-c", &line]).status()?.success(), "{line}");
        let groups = control_groups(&container.id)?;
        let via = host.path().join("via-b");
        let joined = groups.iter().map(|it| format!("echo $$ > {}/cgroup.procs\n", it.display()));
        let script =
            format!("#!/bin/sh\n{}exec {} \"$@\"\n", joined.collect::<String>(), host.via());
        fs::write(&via, script)?;
        fs::set_permissions(&via, Permissions::from_mode(0o755))?;
        Ok(Self { via, groups })
    }

    /// The program that runs the words behind it there, for `--via`.
    pub fn via(&self) -> String {
        self.via.display().to_string()
    }
}

impl Drop for SecondRuntime {
    fn drop(&mut self) {
        self.groups.iter().for_each(|it| drop(fs::remove_dir(it)));
    }
}

/// A control group in each hierarchy: containers of the second host must not be in those of the first.
fn control_groups(name: &str) -> Result<Vec<PathBuf>> {
    let own = fs::read_to_string("/proc/self/cgroup")?;
    let mut groups = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controller, path) = parts.next().zip(parts.next()).context("a control group")?;
        let root = match controller {
            "" => PathBuf::from("/sys/fs/cgroup/unified"),
            _ => PathBuf::from("/sys/fs/cgroup").join(controller.trim_start_matches("name=")),
        };
        let root = if root.is_dir() { root } else { PathBuf::from("/sys/fs/cgroup") };
        let parent = root.join(path.trim_start_matches('/'));
        let group = parent.join(format!("{name}-b"));
        // One that is not mounted is not used.
        if fs::create_dir(&group).is_err() {
            continue;
        }
        for file in ["cpuset.cpus", "cpuset.mems"] {
            // Without them a group of that hierarchy takes no process.
            if let Ok(of_parent) = fs::read(parent.join(file)) {
                let _ = fs::write(group.join(file), of_parent);
            }
        }
        groups.push(group);
    }
    Ok(groups)
}
