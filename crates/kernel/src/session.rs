use crate::KernelError;
use rustix::process::getpid;
use std::fs::{self, File};
use std::io::Write;

/// What the scheduler weighs a session by, as nice values weigh threads.
const WEIGHT: &str = "/proc/self/autogroup";

/// The session of this process, which leads it: all others in it were
/// started by it.
///
/// Where sessions are groups ([`are_sessions_groups`]) the scheduler shares a CPU
/// between sessions by their weight, and only then among the threads of each by
/// theirs (sched(7), "The autogroup feature").
#[derive(Debug)]
pub struct OwnSession(File);

impl OwnSession {
    /// It, if this process leads its session and can weigh it at any time; that is, with
    /// CAP_SYS_ADMIN: others are refused twice in 100 ms (kernel/sched/autogroup.c), and
    /// might not get back from a low weight.
    pub fn of_this_process() -> Option<Self> {
        // Not by rustix, whose numbers of processes cannot be 0: that of a session which was
        // made outside this PID namespace is.
        // SAFETY: getsid takes and returns integers.
        if unsafe { libc::getsid(0) } != getpid().as_raw_pid() {
            return None;
        }
        let session = Self(File::options().write(true).open(WEIGHT).ok()?);
        session.make_nice(0).and_then(|()| session.make_nice(0)).is_ok().then_some(session)
    }

    /// Gives it the weight of this nice value, -20 to 19; 0 is what every session
    /// begins with.
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn make_nice(&self, nice: i32) -> Result<(), KernelError> {
        (&self.0)
            .write_all(nice.to_string().as_bytes())
            .map_err(|cause| KernelError::new("write", format!("{nice} to {WEIGHT}"), cause))
    }
}

/// Whether the scheduler takes sessions for groups (`kernel.sched_autogroup_enabled`).
/// Processes of a control group with a CPU weight are of that group nonetheless.
pub fn are_sessions_groups() -> bool {
    let setting = fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled");
    setting.is_ok_and(|setting| setting.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Runs itself in a PID namespace where its session has no number.
    #[test]
    fn a_session_from_outside_the_pid_namespace_is_not_ours() {
        const INSIDE: &str = "DEWAR_TEST_INSIDE";
        if std::env::var_os(INSIDE).is_some() {
            assert!(OwnSession::of_this_process().is_none());
            return;
        }
        let ran = Command::new("unshare")
            .args(["--pid", "--fork"])
            .arg(std::env::current_exe().expect("this test"))
            .args([
                "--exact",
                "session::tests::a_session_from_outside_the_pid_namespace_is_not_ours",
            ])
            .env(INSIDE, "1")
            .output()
            .expect("unshare");
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.contains("1 passed"), "{said}");
    }
}
