//! How a QEMU may make a userfaultfd: by itself, or by `/dev/userfaultfd`, which it is
//! given where it needs it (userfaultfd(2)).

use crate::qmp::Qmp;
use dewar_kernel::{Pid, list_fds, open_userfaultfd_device};
use dewar_memory::{ProcessHandle, UffdOrigin};
use serde_json::json;
use std::error::Error;
use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

/// The name under which QEMU holds `/dev/userfaultfd` for us.
const UFFD_DEVICE: &str = "dewar-uffd";
/// Bit of `CAP_SYS_PTRACE` in `/proc/PID/status`.
const CAP_SYS_PTRACE: u64 = 1 << 19;

/// How QEMU's process may make a userfaultfd; it is given `/dev/userfaultfd`
/// where it needs it.
///
/// # Errors
/// Where it cannot be given the right to.
pub fn uffd_origin(
    qmp: &mut Qmp,
    process: &ProcessHandle,
) -> Result<UffdOrigin, Box<dyn Error + Send + Sync>> {
    let may_call = may_call_userfaultfd(process.pid());
    if may_call == May::Surely {
        return Ok(UffdOrigin::Syscall);
    }
    let device = match open_userfaultfd_device() {
        Err(_) if may_call == May::Perhaps => return Ok(UffdOrigin::Syscall),
        device => device?,
    };
    qmp.execute_with_fd("getfd", json!({"fdname": UFFD_DEVICE}), device.as_fd())?;
    let files = list_fds(process.pid())?;
    let theirs = files.iter().find(|file| file.target == Path::new("/dev/userfaultfd"));
    theirs.map(|file| UffdOrigin::Device(file.number)).ok_or_else(|| "QEMU does not have it".into())
}

/// Takes `/dev/userfaultfd` away from QEMU again, where it was given that.
pub fn close_userfaultfd_device(qmp: &mut Qmp) {
    let _ = qmp.execute("closefd", json!({"fdname": UFFD_DEVICE}));
}

/// Whether a process may make a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum May {
    Surely,
    /// A filter, a service manager's say, may end who makes a call that few make.
    Perhaps,
    No,
}

/// Whether the process may make a userfaultfd that serves the kernel's own
/// accesses too (userfaultfd(2)).
fn may_call_userfaultfd(pid: Pid) -> May {
    let everybody = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd")
        .is_ok_and(|text| text.trim() == "1");
    let status = fs::read_to_string(format!("/proc/{}/status", pid.0)).unwrap_or_default();
    let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let effective = field("CapEff:").and_then(|caps| u64::from_str_radix(caps, 16).ok());
    let filter = field("Seccomp:").is_some_and(|mode| mode != "0");
    match everybody || effective.is_some_and(|caps| caps & CAP_SYS_PTRACE != 0) {
        true if filter => May::Perhaps,
        true => May::Surely,
        false => May::No,
    }
}
