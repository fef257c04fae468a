//! Runtimes and CRIUs that outlived the command that started them.
//!
//! Such a CRIU waits for a client that fetches pages, for ever, while the container is frozen.
//!
//! **How they are found.** Each process that a dump starts has the guest's mark in its environment, and its
//! children inherit it. CRIU may write its title over its own environment; the runtime that started it keeps
//! the mark.
//!
//! **How they are ended.** Dewar connects to CRIU's page server and closes the connection. CRIU then ends and
//! leaves the container as it was. Dewar kills only those that are still there after a while.
//!
//! **What a killed CRIU leaves.** Firewall rules in the container's network drop all of its packets, and
//! CRIU's code stays in its processes, beside which CRIU cannot work again. Dewar removes both, whatever
//! killed CRIU.

use crate::network::Network;
use crate::processes::{Processes, tracer};
use dewar_kernel::{Pid, ProcessHandle, unmap_in};
use dewar_registry::ProcessId;
use rustix::process::geteuid;
use std::fs;
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// The variable with the mark.
const MARK: &str = "DEWAR_DUMP_OF";
/// How long what was left may take to come to its end before it is killed, and to be gone then.
const ENDS_WITHIN: Duration = Duration::from_secs(20);
const GONE_WITHIN: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(5);
/// The file behind CRIU's code in a process (`compel/src/lib/infect.c`).
const CODE: &str = "/memfd:CRIUMFD";
/// How often it is looked whether a thread has come out of that code.
const TRIES: u32 = 100;

/// Whose the processes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strays {
    mark: String,
    /// Where their page server listens.
    port: Option<u16>,
}

impl Strays {
    /// Those of a guest, by a name that no other guest of the host has.
    pub fn of(guest: &str) -> Self {
        Self { mark: guest.to_owned(), port: None }
    }

    /// The same, where their page server listens on this port.
    #[must_use]
    pub fn with_port(self, port: u16) -> Self {
        Self { port: Some(port), ..self }
    }

    /// Where their page server listens.
    pub(crate) fn port(&self) -> Option<u16> {
        self.port
    }

    /// Marks a program that is about to be started.
    pub(crate) fn mark(&self, command: &mut Command) {
        command.env(MARK, &self.mark);
    }

    /// The variable that does it.
    pub(crate) fn variable(&self) -> (&'static str, String) {
        (MARK, self.mark.clone())
    }

    /// Ends them; then takes away what a killed CRIU left in the container whose first process this is. Says
    /// whether all are gone.
    pub fn end(&self, container: ProcessId) -> bool {
        let is_over = self.end_all();
        clean(container);
        is_over
    }

    /// Ends them, and says whether all are gone.
    pub fn end_all(&self) -> bool {
        let ask = || {
            if let Some(port) = self.port {
                // Nobody may listen yet, or any more.
                let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, port))
                    .and_then(|connection| connection.shutdown(Shutdown::Both));
            }
        };
        self.end_by(&ask, ENDS_WITHIN)
    }

    /// The same by what asks them to end, again and again, for so long; after that they are killed.
    pub(crate) fn end_by(&self, ask: &dyn Fn(), patience: Duration) -> bool {
        let began = Instant::now();
        loop {
            let found = self.find();
            if found.is_empty() {
                return true;
            }
            if began.elapsed() > patience + GONE_WITHIN {
                return false;
            }
            if began.elapsed() > patience {
                found.iter().for_each(|process| drop(process.kill()));
            }
            ask();
            std::thread::sleep(LOOK);
        }
    }

    /// Whether one is there.
    pub(crate) fn any(&self) -> bool {
        !self.find().is_empty()
    }

    /// Kills them: for those that would not come to their end.
    pub(crate) fn kill(&self) {
        self.find().iter().for_each(|process| drop(process.kill()));
    }

    fn find(&self) -> Vec<ProcessHandle> {
        let wanted = format!("{MARK}={}", self.mark);
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|it| it.file_name().to_string_lossy().parse::<i32>().ok());
        pids.filter_map(|pid| {
            // Opened first: the number may be another's a moment later.
            let process = ProcessHandle::open(Pid(pid)).ok()?;
            // Anybody can have the mark.
            let owner = fs::metadata(format!("/proc/{pid}")).ok()?.uid();
            if owner != geteuid().as_raw() {
                return None;
            }
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let mut variables = environment.split(|byte| *byte == 0);
            variables.any(|it| it == wanted.as_bytes()).then_some(process)
        })
        .collect()
    }
}

/// Takes away what a killed CRIU left in a container, if it did.
pub(crate) fn clean(container: ProcessId) {
    if !container.is_alive() {
        return;
    }
    let Ok(processes) = Processes::of(container.pid) else { return };
    // Its user's own CRIU may be at work, whose rules and code these are.
    if processes.pids().any(|pid| tracer(pid) != 0) {
        return;
    }
    Network::of(container.pid).unlock();
    for pid in processes.pids() {
        let code = code_of(pid);
        if !code.is_empty() && has_left(pid, &code) {
            // Where that fails the next dump says so.
            code.iter().for_each(|range| drop(unmap_in(Pid(pid), range)));
        }
    }
}

/// Whether CRIU's code is in a process: of one at work, or of one that was killed.
pub(crate) fn has_code(pid: i32) -> bool {
    !code_of(pid).is_empty()
}

/// Where CRIU's code lies in a process.
fn code_of(pid: i32) -> Vec<Range<u64>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let address = |text: &str| u64::from_str_radix(text, 16).ok();
    let range = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        Some(address(start)?..address(end)?)
    };
    maps.lines().filter(|line| line.contains(CODE)).filter_map(range).collect()
}

/// Waits until no thread of a process is in CRIU's code: it goes back by itself when nobody speaks with it.
fn has_left(pid: i32, code: &[Range<u64>]) -> bool {
    let is_inside = |address: u64| code.iter().any(|range| range.contains(&address));
    (0..TRIES).any(|_| {
        let has = !counters(pid).into_iter().any(is_inside);
        if !has {
            std::thread::sleep(LOOK);
        }
        has
    })
}

/// Where the threads are that wait in a system call (proc_pid_syscall(5)). One that runs is soon out of CRIU's code,
/// which does nothing but system calls.
fn counters(pid: i32) -> Vec<u64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let counter = |task: fs::DirEntry| {
        let text = fs::read_to_string(task.path().join("syscall")).ok()?;
        u64::from_str_radix(text.split_whitespace().last()?.trim_start_matches("0x"), 16).ok()
    };
    tasks.filter_map(counter).collect()
}
