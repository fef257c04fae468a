use crate::inject::Traced;
use crate::{KernelError, Pid};
use std::marker::PhantomData;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_micros(50);

/// A thread of another process that stands still, by ptrace(2). It runs on when this value is dropped, or when
/// the thread that holds it ends, however that is.
#[derive(Debug)]
pub struct HeldThread {
    _traced: Traced,
    /// Only the thread that traces another may let it go.
    _stays: PhantomData<*const ()>,
}

/// Stops threads for a moment. A system call of theirs that waits is made again later, or ends early, as by a
/// signal that is ignored.
#[derive(Debug, Default)]
pub struct ThreadHolder {
    /// Those that were asked to stop and have not: one that waits for a disk does when it goes on.
    /// None may be dropped before: it would stop then, and stay so.
    asked: Vec<Traced>,
    _stays: PhantomData<*const ()>,
}

impl ThreadHolder {
    /// Stops these threads of a process, and waits no longer than this for them. Those that do not come to a stop
    /// by then run on when they do.
    pub fn hold(&mut self, process: Pid, threads: &[i32], within: Duration) -> Vec<HeldThread> {
        let late: Vec<i32> = self.asked.iter().map(|traced| traced.thread().0).collect();
        for thread in threads.iter().filter(|thread| !late.contains(thread)) {
            // A number that is another's by now is none of the process.
            let is_there = || Self::is_of(process, *thread);
            if let Some(traced) = is_there().then(|| Traced::ask(Pid(*thread)).ok()).flatten() {
                self.asked.push(traced);
            }
        }
        let deadline = Instant::now() + within;
        let mut held = Vec::new();
        loop {
            for traced in std::mem::take(&mut self.asked) {
                let is_late = late.contains(&traced.thread().0);
                match traced.has_stopped() {
                    // Its share is over.
                    Ok(true) if is_late => drop(traced),
                    Ok(true) => held.push(HeldThread { _traced: traced, _stays: PhantomData }),
                    Ok(false) => self.asked.push(traced),
                    // It has ended.
                    Err(_) => {}
                }
            }
            if self.asked.iter().all(|traced| late.contains(&traced.thread().0))
                || Instant::now() >= deadline
            {
                return held;
            }
            std::thread::sleep(POLL);
        }
    }

    /// Lets those go that have stopped after all, too late. Returns whether there are more that have not yet: they will
    /// stop, and must be let go then.
    pub fn release_late(&mut self) -> bool {
        self.asked.retain(|traced| matches!(traced.has_stopped(), Ok(false)));
        !self.asked.is_empty()
    }

    /// Whether a thread is one of this process.
    #[must_use]
    pub fn is_of(process: Pid, thread: i32) -> bool {
        std::path::Path::new(&format!("/proc/{}/task/{thread}", process.0)).exists()
    }

    /// That a thread may be held by us.
    ///
    /// # Errors
    /// Where it may not be traced, or is by another.
    pub fn require(thread: Pid) -> Result<(), KernelError> {
        Traced::stop(thread).map(drop)
    }
}
