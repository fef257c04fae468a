//! A userfaultfd for another process's memory: made inside that process,
//! then fetched. A copy stays open there, so what it tracks or serves outlives
//! the command, and the next command finds it by its features in `/proc/PID/fdinfo`.

use crate::inject::{inject_past_filter, inject_six_past_filter, inject_syscall};
use crate::uffd::{FEATURES, NEW_FLAGS, USER_MODE_ONLY, USERFAULTFD_IOC_NEW};
use crate::{KernelError, Pid, ProcessHandle, Userfaultfd, list_fds};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

/// As much as [`populate_small_pages_in`] has mapped by one call.
const POPULATE_STEP: u64 = 8 << 20;
/// How the process may make a userfaultfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UffdOrigin {
    /// By the system call: it runs with `CAP_SYS_PTRACE`, or the host allows it
    /// to everybody (`vm.unprivileged_userfaultfd`).
    Syscall,
    /// Through `/dev/userfaultfd`, which it has open under this number.
    Device(i32),
}

/// The userfaultfd of `process`: the one that an earlier command left there,
/// or else a new one.
///
/// # Errors
/// EPERM where the process may not make one (then hand it `/dev/userfaultfd`);
/// else where it cannot be traced.
pub fn userfaultfd_of(
    process: &ProcessHandle,
    origin: UffdOrigin,
) -> Result<Userfaultfd, KernelError> {
    match leftovers(process)?.into_iter().next() {
        Some((_, left)) => Ok(left),
        None => make(process, origin),
    }
}

/// The userfaultfd of `process` that has this [`Userfaultfd::identity`].
///
/// # Errors
/// Where the process cannot be traced.
pub fn known_userfaultfd_of(
    process: &ProcessHandle,
    identity: u64,
) -> Result<Option<Userfaultfd>, KernelError> {
    let known = |uffd: &Userfaultfd| uffd.identity().is_ok_and(|it| it == identity);
    Ok(leftovers(process)?.into_iter().map(|(_, uffd)| uffd).find(known))
}

/// A new userfaultfd of `process`; what earlier commands left there is closed,
/// and with it ends what they tracked. One that still serves missing pages is
/// left alone: without the process's own copy, touches would find zeros in
/// place of waiting, should the server die.
///
/// # Errors
/// As [`userfaultfd_of`]; EBUSY where pages are still being served.
pub fn new_userfaultfd_of(
    process: &ProcessHandle,
    origin: UffdOrigin,
) -> Result<Userfaultfd, KernelError> {
    let left = leftovers(process)?;
    if !left.is_empty() && is_served(process.pid())? {
        let cause = io::Error::from_raw_os_error(libc::EBUSY);
        return Err(KernelError::new("userfaultfd", process.pid().to_string(), cause));
    }
    for (number, left) in left {
        drop(left);
        inject_syscall(process.pid(), libc::SYS_close as u64, [number as u64, 0, 0])?;
    }
    make(process, origin)
}

/// A userfaultfd for the memory of a process, of which the process itself keeps no copy: what it tracks ends with
/// ours. Made without any right: it may only be used to track writes. A filter of system calls has no say.
///
/// # Errors
/// Where the process cannot be traced, or its filter cannot be lifted.
pub fn passing_userfaultfd_of(process: &ProcessHandle) -> Result<Userfaultfd, KernelError> {
    let pid = process.pid();
    let flags = NEW_FLAGS | USER_MODE_ONLY;
    let number = inject_past_filter(pid, libc::SYS_userfaultfd as u64, [flags, 0, 0])?.result;
    if number < 0 {
        let cause = io::Error::from_raw_os_error(-number as i32);
        return Err(KernelError::new("userfaultfd", pid.to_string(), cause));
    }
    let made = process.fetch_fd(number as i32);
    inject_past_filter(pid, libc::SYS_close as u64, [number as u64, 0, 0])?;
    Userfaultfd::handshake(made?, pid)
}

/// Makes a process close the userfaultfds that a dead command of ours left in it.
///
/// # Errors
/// Where the process cannot be traced.
pub fn close_left_userfaultfds_of(pid: Pid) -> Result<(), KernelError> {
    for fd in list_fds(pid)? {
        let is_one = fd.target == Path::new("anon_inode:[userfaultfd]");
        if is_one && features(pid, fd.number) == Some(FEATURES) {
            inject_syscall(pid, libc::SYS_close as u64, [fd.number as u64, 0, 0])?;
        }
    }
    Ok(())
}

/// Makes a process unmap memory of its own that nothing in it needs.
///
/// # Errors
/// Where the process cannot be traced, or does not unmap it.
pub fn unmap_in(pid: Pid, range: &Range<u64>) -> Result<(), KernelError> {
    let arguments = [range.start, range.end - range.start, 0];
    match inject_past_filter(pid, libc::SYS_munmap as u64, arguments)?.result {
        0 => Ok(()),
        error => {
            let cause = io::Error::from_raw_os_error(-error as i32);
            Err(KernelError::new("munmap", pid.to_string(), cause))
        }
    }
}

/// Maps a file that a process has open as `number` in place of what it has at `range`, shared, to be read and
/// written. What was there is unmapped in the same moment.
///
/// # Errors
/// Where the process cannot be traced, or the kernel refuses.
pub fn map_over_in(pid: Pid, range: &Range<u64>, number: i32) -> Result<(), KernelError> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let how = libc::MAP_SHARED | libc::MAP_FIXED;
    let bytes = range.end - range.start;
    let arguments = [range.start, bytes, access as u64, how as u64, number as u64, 0];
    let mapped = inject_six_past_filter(pid, libc::SYS_mmap as u64, arguments)?.result;
    if mapped == range.start as i64 {
        return Ok(());
    }
    let cause = io::Error::from_raw_os_error(-mapped as i32);
    Err(KernelError::new("mmap", pid.to_string(), cause))
}

/// Has a process know the file that it has open as `number` as `onto`, too, in place of the file that it has there
/// (dup3(2)).
///
/// # Errors
/// Where the process cannot be traced, or the kernel refuses.
pub fn duplicate_in(pid: Pid, number: i32, onto: i32) -> Result<(), KernelError> {
    let arguments = [number as u64, onto as u64, libc::O_CLOEXEC as u64];
    match inject_past_filter(pid, libc::SYS_dup3 as u64, arguments)?.result {
        error if error < 0 => {
            let cause = io::Error::from_raw_os_error(-error as i32);
            Err(KernelError::new("dup3", pid.to_string(), cause))
        }
        _ => Ok(()),
    }
}

/// Makes a process map all of a shared file that it has at `range` by small pages, and has each of them present.
/// What is in the file stays as it is. The thread that is made to do it stands still for a few milliseconds, again
/// and again.
///
/// # Errors
/// Where the process cannot be traced, or the file has no room for a page that it lacks.
pub fn populate_small_pages_in(pid: Pid, range: &Range<u64>) -> Result<(), KernelError> {
    let advise = |start: u64, end: u64, advice: i32| {
        let arguments = [start, end - start, advice as u64];
        match inject_past_filter(pid, libc::SYS_madvise as u64, arguments)?.result {
            0 => Ok(()),
            error => {
                let cause = io::Error::from_raw_os_error(-error as i32);
                Err(KernelError::new("madvise", pid.to_string(), cause))
            }
        }
    };
    advise(range.start, range.end, libc::MADV_NOHUGEPAGE)?;
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start + POPULATE_STEP);
        // Huge pages that are there would stay.
        advise(start, end, libc::MADV_DONTNEED)?;
        advise(start, end, libc::MADV_POPULATE_WRITE)?;
        start = end;
    }
    Ok(())
}

/// Whether touches of missing pages wait for somebody anywhere in the process
/// (`um` among the `VmFlags` of proc_pid_smaps(5)).
fn is_served(pid: Pid) -> Result<bool, KernelError> {
    let path = format!("/proc/{}/smaps", pid.0);
    let text = fs::read_to_string(&path).map_err(|cause| KernelError::new("read", path, cause))?;
    let mut flags = text.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    Ok(flags.any(|flags| flags.split_whitespace().any(|flag| flag == "um")))
}

fn make(process: &ProcessHandle, origin: UffdOrigin) -> Result<Userfaultfd, KernelError> {
    let pid = process.pid();
    let (name, number, arguments) = match origin {
        UffdOrigin::Syscall => ("userfaultfd", libc::SYS_userfaultfd, [NEW_FLAGS, 0, 0]),
        UffdOrigin::Device(fd) => {
            ("USERFAULTFD_IOC_NEW", libc::SYS_ioctl, [fd as u64, USERFAULTFD_IOC_NEW, NEW_FLAGS])
        }
    };
    let result = inject_syscall(pid, number as u64, arguments)?.result;
    if result < 0 {
        let cause = io::Error::from_raw_os_error(-result as i32);
        return Err(KernelError::new(name, pid.to_string(), cause));
    }
    Userfaultfd::handshake(process.fetch_fd(result as i32)?, pid)
}

/// The userfaultfds that Dewar made in the process before, with their numbers
/// there. One whose maker died before the handshake (no features yet) is as
/// good as new.
fn leftovers(process: &ProcessHandle) -> Result<Vec<(i32, Userfaultfd)>, KernelError> {
    let pid = process.pid();
    let mut found = Vec::new();
    for fd in list_fds(pid)? {
        if fd.target != Path::new("anon_inode:[userfaultfd]") {
            continue;
        }
        match features(pid, fd.number) {
            Some(FEATURES) => {
                found.push((fd.number, Userfaultfd::resume(process.fetch_fd(fd.number)?, pid)));
            }
            Some(0) => {
                if let Ok(made) = Userfaultfd::handshake(process.fetch_fd(fd.number)?, pid) {
                    found.push((fd.number, made));
                }
            }
            _ => {}
        }
    }
    Ok(found)
}

/// The kernel's own mark of a descriptor whose handshake is done
/// (`UFFD_FEATURE_INITIALIZED` in include/linux/userfaultfd_k.h).
const INITIALIZED: u64 = 1 << 31;

/// Reads `API: aa:FEATURES:...` of an fdinfo file.
fn features(pid: Pid, fd: i32) -> Option<u64> {
    let info = fs::read_to_string(format!("/proc/{}/fdinfo/{fd}", pid.0)).ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("API:"))?;
    let features = u64::from_str_radix(line.trim().split(':').nth(1)?, 16).ok()?;
    Some(features & !INITIALIZED)
}
