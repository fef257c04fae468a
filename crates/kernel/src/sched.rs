use crate::{KernelError, Task};
use std::time::Duration;

/// A thread of this process, by its number in `/proc/self/task`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadId(i32);

/// How a thread is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ThreadActivity {
    /// The time that it had a CPU since it began.
    pub ran: Duration,
    /// Whether it runs or wants to, rather than wait for something.
    pub runnable: bool,
}

impl ThreadId {
    /// The calling thread.
    pub fn own() -> Self {
        // SAFETY: gettid takes nothing and cannot fail.
        Self(unsafe { libc::gettid() })
    }

    /// The same, as others know it.
    pub fn task(self) -> Task {
        Task { process: std::process::id() as i32, thread: self.0 }
    }

    /// Puts the thread under `SCHED_IDLE`: it runs only where nobody else
    /// wants the CPU, so a guest does not feel it (sched(7)).
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn make_idle(self) -> Result<(), KernelError> {
        self.schedule(libc::SCHED_IDLE)
    }

    /// Puts the thread back among the ordinary ones, at the nice value that it had.
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn make_ordinary(self) -> Result<(), KernelError> {
        self.schedule(libc::SCHED_OTHER)
    }

    /// Puts the thread among the ordinary ones, at this nice value.
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn make_nice(self, nice: i32) -> Result<(), KernelError> {
        self.make_ordinary()?;
        // SAFETY: the call takes integers.
        let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, self.0 as u32, nice) };
        if result != 0 { Err(KernelError::last("setpriority", self.describe())) } else { Ok(()) }
    }

    /// How it is; `None` where it has ended or the kernel does not count
    /// (`/proc/PID/schedstat`, Documentation/scheduler/sched-stats.rst).
    pub fn activity(self) -> Option<ThreadActivity> {
        let task = self.task();
        Some(ThreadActivity { ran: task.ran()?, runnable: task.is_runnable() })
    }

    fn schedule(self, policy: i32) -> Result<(), KernelError> {
        let parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: the parameter block outlives the call.
        let result = unsafe { libc::sched_setscheduler(self.0, policy, &parameters) };
        if result != 0 {
            return Err(KernelError::last("sched_setscheduler", self.describe()));
        }
        Ok(())
    }

    fn describe(self) -> String {
        format!("thread {}", self.0)
    }
}
