//! Two hosts on this machine, as far as a guest's QEMU can tell: network namespaces with a cable between
//! them, and mount namespaces; in the second the folders of guests are others. Their disks are in both under the same paths, as on shared storage; sockets
//! are each host's own.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The address of a host that was made as `number`.
pub(crate) fn address(number: u8) -> String {
    format!("10.77.0.{number}")
}

/// The namespaces, which live as long as this does.
#[derive(Debug)]
pub(crate) struct OtherHost {
    process: Child,
    /// Whether the folders of guests are others here.
    pub is_second: bool,
}

impl OtherHost {
    /// The first host, which has the folders of `lab` as they are.
    pub(crate) fn first() -> Result<Self> {
        Self::start("", false)
    }

    /// The second, for the guests that have these folders in `lab`; a cable leads to the first.
    pub(crate) fn second(lab: &Path, guests: &[&str], first: &Self) -> Result<Self> {
        let mut mounts = String::new();
        for name in guests {
            let (ours, theirs) = (lab.join(name), Self::folder(lab, name));
            fs::create_dir_all(&ours)?;
            fs::create_dir_all(&theirs)?;
            let is_shared = |it: &fs::DirEntry| {
                it.file_type().is_ok_and(|kind| kind.is_file() || kind.is_fifo())
            };
            for entry in fs::read_dir(&ours)?.flatten().filter(is_shared) {
                fs::hard_link(entry.path(), theirs.join(entry.file_name()))?;
            }
            mounts += &format!("mount --bind {} {} && ", theirs.display(), ours.display());
        }
        let first = first.process.id();
        let (one, other) = (address(1), address(2));
        let there = format!("nsenter --net=/proc/{first}/ns/net -- ip");
        let cable = format!(
            "ip link add c type veth peer name c netns {first} && ip addr add {other}/24 dev c && \
             ip link set c up && {there} addr add {one}/24 dev c && {there} link set c up && "
        );
        Self::start(&format!("{mounts}{cable}"), true)
    }

    fn start(before: &str, is_second: bool) -> Result<Self> {
        let script = format!("ip link set lo up && {before}echo ready && exec sleep 100000");
        let mut process = Command::new("unshare")
            .args(["--mount", "--net", "--propagation", "private", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .spawn()
            .context("unshare")?;
        let mut said = String::new();
        BufReader::new(process.stdout.take().context("output")?).read_line(&mut said)?;
        let host = Self { process, is_second };
        ensure!(said.trim() == "ready", "a host's namespace: '{said}'");
        Ok(host)
    }

    /// Where a guest's sockets of this host are, seen from outside.
    pub(crate) fn folder(lab: &Path, guest: &str) -> PathBuf {
        lab.join(format!("b-{guest}"))
    }

    /// The words that lead into it.
    pub(crate) fn via(&self) -> String {
        format!("nsenter {} --", self.namespaces().join(" "))
    }

    /// A program there.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(self.namespaces()).arg("--").arg(program);
        command
    }

    fn namespaces(&self) -> [String; 2] {
        let of =
            |option: &str, name: &str| format!("--{option}=/proc/{}/ns/{name}", self.process.id());
        [of("mount", "mnt"), of("net", "net")]
    }
}

impl Drop for OtherHost {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
