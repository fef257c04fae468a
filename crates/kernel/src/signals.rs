use crate::KernelError;
use std::os::fd::{FromRawFd, OwnedFd};

/// A file that can be read when somebody asks this process to end (SIGINT, SIGTERM,
/// SIGHUP); they no longer end it by themselves (signalfd(2)). Nor does a terminal
/// stop it ([`run_on`]). To be called before any thread is made; children inherit it.
///
/// # Errors
/// Where the kernel refuses.
pub fn end_signals() -> Result<OwnedFd, KernelError> {
    run_on()?;
    let set = block(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])?;
    // SAFETY: the set was made by sigemptyset and outlives the call; the file that
    // signalfd makes is ours alone.
    unsafe {
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC);
        if fd < 0 {
            return Err(KernelError::last("signalfd", "the signals that end a process"));
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Keeps a terminal from stopping this process (SIGTSTP, SIGTTIN, SIGTTOU): what it holds,
/// a guest that stands still say, would be held without end. To be called before any
/// thread is made; children inherit it.
///
/// # Errors
/// Where the kernel refuses.
pub fn run_on() -> Result<(), KernelError> {
    block(&[libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU]).map(drop)
}

/// Lets this process learn how its children end, whatever signals its parent ignores
/// (SIGCHLD, wait(2)).
pub fn heed_children() {
    // SAFETY: the default action is no function of ours; the call cannot fail for SIGCHLD.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
    }
}

/// Blocks signals, beside those that are blocked already; returns them as a set.
fn block(signals: &[i32]) -> Result<libc::sigset_t, KernelError> {
    // SAFETY: the set is made by sigemptyset before it is used and outlives all calls.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
            0 => Ok(set),
            // It tells the error by its result (pthread_sigmask(3)).
            code => {
                let cause = std::io::Error::from_raw_os_error(code);
                Err(KernelError::new("pthread_sigmask", "signals", cause))
            }
        }
    }
}
