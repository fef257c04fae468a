//! Commands of which one call to the kernel goes wrong, by strace(1).

use anyhow::{Context, Result};
use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Output};

/// Calls by which a command changes a file, or says something to a server.
pub const CHANGES: &str = "mkdir,link,linkat,rename,renameat,renameat2,unlink,unlinkat,\
                           ftruncate,fallocate,write,pwrite64,fsync,fdatasync,sendto";

/// Calls that need room on a disk.
pub const NEED_ROOM: &str = "mkdir,rename,ftruncate,fallocate,write,pwrite64,fsync";

/// What goes wrong with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed before the call does anything.
    Killed,
    /// The disk is full.
    NoRoom,
    /// It has as many files open as it may.
    NoDescriptor,
}

/// A call that a command made.
#[derive(Debug, Clone)]
pub struct Call {
    /// What strace says of it.
    pub text: String,
    name: String,
    /// Which one of this name it is, from 1.
    ordinal: usize,
}

/// Runs `command`. Returns what it did, and the calls of these kinds that its first
/// thread made, in their order; its other threads and its children are not looked at.
///
/// # Errors
/// Where there is no strace, or it cannot trace.
pub fn calls_of(command: &Command, kinds: &str) -> Result<(Output, Vec<Call>)> {
    let (output, report) = strace(command, &format!("trace={kinds}"), None)?;
    Ok((output, calls_in(&report)))
}

fn calls_in(report: &str) -> Vec<Call> {
    let mut made = HashMap::<&str, usize>::new();
    let call = |line| -> Option<Call> {
        let (name, _) = str::split_once(line, '(')?;
        let ordinal = made.entry(name).and_modify(|it| *it += 1).or_insert(1);
        Some(Call { text: line.to_owned(), name: name.to_owned(), ordinal: *ordinal })
    };
    report.lines().filter_map(call).collect()
}

/// Runs `command` and lets what is this call in its order go wrong. Returns what it did,
/// and, where it did not come to that call, the calls of these kinds that it made: how
/// often a command asks whether something is done differs from time to time.
///
/// # Errors
/// Where there is no strace, or it cannot trace.
pub fn with_fault(
    command: &Command,
    kinds: &str,
    call: &Call,
    fault: Fault,
) -> Result<(Output, Option<Vec<Call>>)> {
    let how = match fault {
        Fault::Killed => "signal=SIGKILL",
        Fault::NoRoom => "error=ENOSPC",
        Fault::NoDescriptor => "error=EMFILE",
    };
    let Call { name, ordinal, .. } = call;
    let inject = format!("inject={name}:{how}:when={ordinal}");
    let (output, report) = strace(command, &format!("trace={kinds}"), Some(&inject))?;
    let went_wrong = report.contains("(INJECTED)") || report.contains("+++ killed by SIGKILL +++");
    Ok((output, (!went_wrong).then(|| calls_in(&report))))
}

fn strace(command: &Command, trace: &str, inject: Option<&str>) -> Result<(Output, String)> {
    let log = tempfile::Builder::new().prefix("dws").tempfile_in("/tmp")?;
    let mut strace = Command::new("strace");
    strace.args(["-qq", "-s", "256", "-o"]).arg(log.path()).args(["-e", trace]);
    if let Some(inject) = inject {
        strace.args(["-e", inject]);
    }
    strace.arg("--").arg(command.get_program()).args(command.get_args());
    strace.current_dir(command.get_current_dir().unwrap_or(Path::new("/")));
    for (name, value) in command.get_envs() {
        value.map(|value| strace.env(name, value));
    }
    let output = strace.output().context("strace")?;
    let report = std::fs::read(log.path()).context("what strace saw")?;
    Ok((output, String::from_utf8_lossy(&report).into_owned()))
}
