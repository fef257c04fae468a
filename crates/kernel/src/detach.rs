use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the command run in a session of its own, so that the end of ours and of our
/// terminal is not its end (setsid(2)).
pub fn detach(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only setsid is called, which is
    // async-signal-safe; its one failure, being a group leader, cannot happen
    // in a fresh child.
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            Ok(())
        })
    }
}

/// Makes the command die when the thread that starts it dies (prctl(2)), so
/// that it does no work that nobody knows of any more.
pub fn die_with_us(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only prctl is called, which is
    // async-signal-safe and takes integers here.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        })
    }
}

/// Has the command begin in this network namespace (setns(2)).
pub fn in_network(command: &mut Command, namespace: OwnedFd) -> &mut Command {
    // SAFETY: between fork and exec only setns is called, which is a plain system call; the
    // file lives in the closure, so its number still means it.
    unsafe {
        command.pre_exec(move || match libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    }
}

/// Lets the command have these files, under the numbers that they have here.
pub fn inherit(command: &mut Command, files: Vec<OwnedFd>) -> &mut Command {
    // SAFETY: between fork and exec only fcntl is called, which is
    // async-signal-safe; the files live in the closure, so their numbers still
    // mean them. What the closure owns is not dropped in the child.
    unsafe {
        command.pre_exec(move || {
            for file in &files {
                if libc::fcntl(file.as_raw_fd(), libc::F_SETFD, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        })
    }
}
