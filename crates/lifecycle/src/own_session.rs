//! A command in a session of its own: as a child of itself.
//!
//! A command that works beside a running guest shall use only CPU time that nothing else wants.
//! Where the scheduler takes sessions for groups (autogroup), the command and the guest are in
//! different groups, and the command lowers the weight of its session ([`OwnSession`]). The session
//! must be its own: the shell's other programs must not become slower. A command that a shell started
//! leads a process group and cannot make a session (setsid(2)); its child can.
//!
//! The parent stands for the child: it stops and ends as the child does, with its exit code or by its
//! signal. If the parent ends, the kernel ends the child at once (PR_SET_PDEATHSIG(2const)), and the
//! guardian brings the guest back. If the parent is stopped (SIGSTOP), the child goes on: a guest may
//! be paused and wait for it.

use dewar_kernel::{OwnSession, are_sessions_groups, detach};
use rustix::io::Errno;
use rustix::process::{
    Pid, RawPid, Signal, WaitOptions, WaitStatus, getpid, getppid, kill_process,
    set_parent_process_death_signal, waitpid,
};
use std::process::{Command, ExitCode};

/// What has become of a command that runs as a child.
#[derive(Debug)]
pub enum AsChild {
    /// The child has ended, with this exit code.
    Ended(ExitCode),
    /// This process is such a child, and its parent has ended.
    Orphan,
}

/// Tells a child whose it is.
pub const PARENT: &str = "DEWAR_APART_OF";

/// Runs this command as a child in a session of its own, where that is of use; returns when it has
/// ended. Nothing where this process is to do the work itself.
pub fn run_as_child() -> Option<AsChild> {
    if let Some(parent) = parent() {
        // It may have ended before it could be known that it did.
        return (!ends_with(parent)).then_some(AsChild::Orphan);
    }
    if !are_sessions_groups() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().ok()?);
    command.args(std::env::args_os().skip(1)).env(PARENT, getpid().to_string());
    // Where it does not start, the command runs as it is, only less kind.
    let child = detach(&mut command).spawn().ok()?;
    let child = Pid::from_child(&child);
    loop {
        match waitpid(Some(child), WaitOptions::UNTRACED) {
            Ok(Some((_, status))) if status.stopped() => {
                let _ = kill_process(getpid(), Signal::STOP);
                let _ = kill_process(child, Signal::CONT);
            }
            Ok(Some((_, status))) => return Some(AsChild::Ended(end_like(status))),
            Ok(None) | Err(Errno::INTR) => (),
            Err(_) => return Some(AsChild::Ended(ExitCode::FAILURE)),
        }
    }
}

/// The session of this process, if it is such a child.
pub fn own_session() -> Option<OwnSession> {
    parent().and_then(|_| OwnSession::of_this_process())
}

/// Whose child this process is, if it is one.
fn parent() -> Option<RawPid> {
    std::env::var(PARENT).ok()?.parse().ok()
}

/// Makes this process end where its parent does; says whether it has that parent still.
fn ends_with(parent: RawPid) -> bool {
    set_parent_process_death_signal(Some(Signal::KILL)).is_ok()
        && getppid().map(Pid::as_raw_pid) == Some(parent)
}

/// Ends this process by the signal that ended the child, or gives its exit code.
fn end_like(status: WaitStatus) -> ExitCode {
    if let Some(signal) = status.terminating_signal().and_then(Signal::from_named_raw) {
        let _ = kill_process(getpid(), signal);
    }
    let code = status.exit_status().and_then(|code| u8::try_from(code).ok());
    code.map_or(ExitCode::FAILURE, ExitCode::from)
}
