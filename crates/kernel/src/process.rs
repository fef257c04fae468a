//! Handles on other processes, and on the files they hold open.

use crate::{KernelError, Task, threads_of};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, Signal};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A process number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pid(pub i32);

impl std::fmt::Display for Pid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {}", self.0)
    }
}

/// Who listens at the other end, as it was when it began to (`SO_PEERCRED`, unix(7));
/// nobody, if that process has no number here: it is of a PID namespace outside this one.
///
/// # Errors
/// Where the kernel does not tell.
// Not by rustix, whose numbers of processes cannot be 0 and whose function takes it for one.
pub fn peer_of(socket: &UnixStream) -> Result<Option<Pid>, KernelError> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the socket is open as long as it is borrowed, and the kernel writes at most
    // `bytes` bytes, the size of `peer`, which any bytes are a value of.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut bytes,
        )
    };
    match answer {
        0 => Ok((peer.pid > 0).then_some(Pid(peer.pid))),
        _ => Err(KernelError::last("getsockopt", "a unix socket")),
    }
}

/// A process, pinned: it never comes to mean another one that got the same
/// number (pidfd_open(2)).
#[derive(Debug)]
pub struct ProcessHandle {
    pid: Pid,
    fd: OwnedFd,
}

impl ProcessHandle {
    /// Takes hold of a process.
    ///
    /// # Errors
    /// Where there is none with that number.
    pub fn open(pid: Pid) -> Result<Self, KernelError> {
        let failed = |cause| KernelError::new("pidfd_open", pid.to_string(), cause);
        let number = rustix::process::Pid::from_raw(pid.0)
            .ok_or_else(|| failed(rustix::io::Errno::INVAL))?;
        let fd = rustix::process::pidfd_open(number, PidfdFlags::empty()).map_err(failed)?;
        Ok(Self { pid, fd })
    }

    /// The process of a pidfd that another sent us; its number is not known here.
    pub fn from_pidfd(fd: OwnedFd) -> Self {
        Self { pid: Pid(0), fd }
    }

    /// Another handle on the same process.
    ///
    /// # Errors
    /// Where no more files can be opened.
    pub fn try_clone(&self) -> Result<Self, KernelError> {
        let failed = |cause| KernelError::new("dup", self.pid.to_string(), cause);
        Ok(Self { pid: self.pid, fd: self.fd.try_clone().map_err(failed)? })
    }

    /// Its number.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.ends_within(Duration::ZERO)
    }

    /// Waits up to `time` for its end; says whether it came.
    pub fn ends_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut polled = [PollFd::new(&self.fd, PollFlags::IN)];
            let timeout =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            match poll(&mut polled, Some(&timeout)) {
                Err(rustix::io::Errno::INTR) => {}
                answer => return matches!(answer, Ok(count) if count > 0),
            }
        }
    }

    /// Sends SIGKILL.
    ///
    /// # Errors
    /// Where it has ended already or is not ours to end.
    pub fn kill(&self) -> Result<(), KernelError> {
        rustix::process::pidfd_send_signal(&self.fd, Signal::KILL)
            .map_err(|cause| KernelError::new("pidfd_send_signal", self.pid.to_string(), cause))
    }

    /// Stops it (SIGSTOP) and waits up to `time` until all its threads stand still; says
    /// whether they do.
    pub fn halt(&self, time: Duration) -> bool {
        let _ = rustix::process::pidfd_send_signal(&self.fd, Signal::STOP);
        let deadline = Instant::now() + time;
        let stands = |task: Task| task.state().is_none_or(|state| "TtZX".contains(state));
        while !threads_of(self.pid.0).into_iter().all(stands) {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        true
    }

    /// Lets it go on (SIGCONT).
    pub fn go_on(&self) {
        // One that has ended needs nothing.
        let _ = rustix::process::pidfd_send_signal(&self.fd, Signal::CONT);
    }

    /// A copy of the file that the process has open as `number`
    /// (pidfd_getfd(2)).
    ///
    /// # Errors
    /// Where it has no such file or we may not trace it.
    pub fn fetch_fd(&self, number: i32) -> Result<OwnedFd, KernelError> {
        rustix::process::pidfd_getfd(&self.fd, number, PidfdGetfdFlags::empty()).map_err(|cause| {
            KernelError::new("pidfd_getfd", format!("file {number} of {}", self.pid), cause)
        })
    }
}

impl AsFd for ProcessHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A file that another process has open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFd {
    /// Its number in that process.
    pub number: i32,
    /// What `/proc/PID/fd/NUMBER` points to.
    pub target: PathBuf,
}

/// The files that a process has open.
///
/// # Errors
/// Where it has ended or we may not look.
pub fn list_fds(pid: Pid) -> Result<Vec<RemoteFd>, KernelError> {
    let folder = format!("/proc/{}/fd", pid.0);
    let entries =
        fs::read_dir(&folder).map_err(|cause| KernelError::new("readdir", &folder, cause))?;
    Ok(entries
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            Some(RemoteFd { number, target: fs::read_link(entry.path()).ok()? })
        })
        .collect())
}
