//! A second host on this machine, as far as a guest's QEMU can tell: a network namespace, and a mount
//! namespace in which the folders of guests are others. Their disks are in both under the same paths, as on shared storage; sockets
//! are each host's own.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The namespace, which lives as long as this does.
#[derive(Debug)]
pub(crate) struct OtherHost {
    process: Child,
}

impl OtherHost {
    /// One for the guests that have these folders in `lab`.
    pub(crate) fn new(lab: &Path, guests: &[&str]) -> Result<Self> {
        let mut mounts = String::new();
        for name in guests {
            let (ours, theirs) = (lab.join(name), Self::folder(lab, name));
            fs::create_dir_all(&ours)?;
            fs::create_dir_all(&theirs)?;
            for entry in fs::read_dir(&ours)?.flatten().filter(|it| it.path().is_file()) {
                fs::hard_link(entry.path(), theirs.join(entry.file_name()))?;
            }
            mounts += &format!("mount --bind {} {} && ", theirs.display(), ours.display());
        }
        let script = format!("ip link set lo up && {mounts}echo ready && exec sleep 100000");
        let mut process = Command::new("unshare")
            .args(["--mount", "--net", "--propagation", "private", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .spawn()
            .context("unshare")?;
        let mut said = String::new();
        BufReader::new(process.stdout.take().context("output")?).read_line(&mut said)?;
        let host = Self { process };
        ensure!(said.trim() == "ready", "the second host's namespace: '{said}'");
        Ok(host)
    }

    /// Where a guest's sockets of this host are, seen from outside.
    pub(crate) fn folder(lab: &Path, guest: &str) -> PathBuf {
        lab.join(format!("b-{guest}"))
    }

    /// The words that lead into it.
    pub(crate) fn via(&self) -> String {
        via(self.process.id())
    }

    /// A program there.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(namespaces(self.process.id())).arg("--").arg(program);
        command
    }
}

/// The words that lead into the namespaces of a process.
pub(crate) fn via(process: u32) -> String {
    format!("nsenter {} --", namespaces(process).join(" "))
}

fn namespaces(process: u32) -> [String; 2] {
    let of = |option: &str, name: &str| format!("--{option}=/proc/{process}/ns/{name}");
    [of("mount", "mnt"), of("net", "net")]
}

impl Drop for OtherHost {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
