use crate::KernelError;
use std::os::fd::{FromRawFd, OwnedFd};

/// A file that can be read when somebody asks this process to end (SIGINT, SIGTERM,
/// SIGHUP); they no longer end it by themselves (signalfd(2)). Nor does a terminal
/// stop it ([`run_on`]). To be called before any thread is made; children inherit it.
///
/// # Errors
/// Where the kernel refuses.
pub fn end_signals() -> Result<OwnedFd, KernelError> {
    let failed = || KernelError::last("signalfd", "the signals that end a process");
    run_on()?;
    // SAFETY: the set is made by sigemptyset before it is used and outlives all
    // calls; the file that signalfd makes is ours alone.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        if libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
            return Err(failed());
        }
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC);
        if fd < 0 { Err(failed()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

/// Keeps a terminal from stopping this process (SIGTSTP, SIGTTIN, SIGTTOU): what it holds,
/// a guest that stands still say, would be held without end. To be called before any
/// thread is made; children inherit it.
///
/// # Errors
/// Where the kernel refuses.
pub fn run_on() -> Result<(), KernelError> {
    // SAFETY: the set is made by sigemptyset before it is used and outlives all calls.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU] {
            libc::sigaddset(&raw mut set, signal);
        }
        if libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
            return Err(KernelError::last("pthread_sigmask", "the signals of a terminal"));
        }
    }
    Ok(())
}
