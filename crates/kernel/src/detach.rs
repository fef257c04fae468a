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
