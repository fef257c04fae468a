use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the command run in a session of its own, so that it outlives us and
/// our terminal (setsid(2)).
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
