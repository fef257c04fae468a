//! Runtimes and CRIUs that a command started for a guest, and that outlived it.
//!
//! A CRIU whose command is gone would wait for ever for somebody to fetch pages, with the container frozen. Each
//! process that a dump starts has the guest's mark in its environment, and so have those that it starts. To kill
//! them is to let the container run (see the top of this crate), but for its network: while CRIU looks at
//! connections it keeps packets out by rules of its own, in the container's network namespace.

use dewar_kernel::{Pid, ProcessHandle};
use dewar_registry::ProcessId;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The variable with the mark.
const MARK: &str = "DEWAR_DUMP_OF";
/// How long killed processes may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(5);
/// The chain of CRIU's rules (`criu/netfilter.c`, `criu/net.c`).
const CHAIN: &str = "CRIU";

/// Whose the processes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strays {
    mark: String,
}

impl Strays {
    /// Those of a guest, by a name that no other guest of the host has.
    pub fn of(guest: &str) -> Self {
        Self { mark: guest.to_owned() }
    }

    /// Marks a program that is about to be started.
    pub(crate) fn mark(&self, command: &mut Command) {
        command.env(MARK, &self.mark);
    }

    /// Kills them, and opens the network of the container again whose first process this is. Says whether
    /// there were any.
    pub fn end(&self, container: Option<ProcessId>) -> bool {
        let began = Instant::now();
        let mut any = false;
        loop {
            let found = self.find();
            if found.is_empty() || began.elapsed() > GONE_WITHIN {
                break;
            }
            any = true;
            found.iter().for_each(|process| drop(process.kill()));
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some(process) = container.filter(|process| any && process.is_alive()) {
            unlock_network(process.pid);
        }
        any
    }

    fn find(&self) -> Vec<ProcessHandle> {
        let wanted = format!("{MARK}={}", self.mark);
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|it| it.file_name().to_string_lossy().parse::<i32>().ok());
        pids.filter_map(|pid| {
            // Opened first: the number may be another's a moment later.
            let process = ProcessHandle::open(Pid(pid)).ok()?;
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let mut variables = environment.split(|byte| *byte == 0);
            variables.any(|it| it == wanted.as_bytes()).then_some(process)
        })
        .collect()
    }
}

/// Kills what a command left that worked on this guest; says whether there was anything.
pub fn end_strays(guest: &str, container: Option<ProcessId>) -> bool {
    Strays::of(guest).end(container)
}

/// Takes CRIU's rules out of a network namespace; where there are none nothing happens.
fn unlock_network(pid: i32) {
    for program in ["iptables", "ip6tables"] {
        let steps: [&[&str]; 4] =
            [&["-D", "INPUT", "-j"], &["-D", "OUTPUT", "-j"], &["-F"], &["-X"]];
        for step in steps {
            let mut command = Command::new("nsenter");
            command.args(["--target", &pid.to_string(), "--net", program, "-w"]).args(step);
            command.arg(CHAIN).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            // Each fails where CRIU had not come so far.
            let _ = command.status();
        }
    }
}
