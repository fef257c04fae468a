//! Threads under a reservation, and how they get out of it.
//!
//! How a thread was scheduled before is written down ([`SavedTask`]) before it is
//! touched; [`give_back`] undoes it from that alone, whoever calls it.

use crate::weight::Group;
use crate::{Entry, Promise, QosError, SavedTask};
use dewar_kernel::{KernelError, Reservation, Scheduling, Task, threads_of};
use std::time::Duration;

/// What a guest's other threads (disks, network, timers) run at meanwhile, so that
/// a reserved guest does not wait for its own disk behind a hog.
const HELPERS_NICE: i32 = -10;
/// What a thread runs at that has used up its promise while its job is not done: as
/// a real-time thread. An ordinary one of the highest weight may wait for long where
/// it comes from another class (seen on 6.18).
const RESCUE_PRIORITY: u32 = 1;

/// How CPU time is promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// `SCHED_DEADLINE`, for each thread.
    Deadline {
        /// Whether it may take what others have reserved and do not use.
        reclaim: bool,
    },
    /// The weight of a control group, for the whole process.
    Weight,
}

/// What became of a wish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    /// More would be promised than there is.
    Refused,
    /// The thread has ended.
    Gone,
}

/// Threads that are held.
#[derive(Debug)]
pub struct Hold {
    period: Duration,
    max: Duration,
    means: Means,
    threads: Vec<Held>,
    group: Option<Group>,
}

#[derive(Debug)]
struct Held {
    task: Task,
    runtime: Duration,
    is_rescued: bool,
}

/// How a guest's threads were before, for [`crate::Ledger::write`].
pub(crate) fn saved(reserved: &[Task], helpers: &[Task]) -> Vec<SavedTask> {
    reserved.iter().chain(helpers).filter_map(|task| SavedTask::of(*task)).collect()
}

impl Hold {
    /// Takes hold of threads: each is promised the most that it may get, or as much of
    /// that as the kernel gives.
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub(crate) fn take(
        tasks: &[Task],
        helpers: &[Task],
        promise: &Promise,
        means: Means,
        group: Option<Group>,
    ) -> Result<Self, QosError> {
        let (period, max) = (promise.period(), promise.period().mul_f64(promise.max));
        let held = |task: &Task| Held { task: *task, runtime: max, is_rescued: false };
        let threads = tasks.iter().map(held).collect();
        let mut hold = Self { period, max, means, threads, group };
        for index in 0..hold.threads.len() {
            hold.begin(index, period.mul_f64(promise.min))?;
        }
        if hold.means != Means::Weight {
            helpers.iter().for_each(|task| raise(*task));
        }
        hold.weigh()?;
        Ok(hold)
    }

    fn begin(&mut self, index: usize, min: Duration) -> Result<(), QosError> {
        loop {
            let error = match self.put(index) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let less = self.threads[index].runtime / 2;
            if error.errno() != Some(errno::EBUSY) || less < min {
                return Err(self.explain(error));
            }
            self.threads[index].runtime = less;
        }
    }

    /// How many threads.
    pub(crate) fn len(&self) -> usize {
        self.threads.len()
    }

    /// The threads.
    pub(crate) fn tasks(&self) -> impl Iterator<Item = Task> {
        self.threads.iter().map(|held| held.task)
    }

    /// What a thread is promised.
    pub(crate) fn runtime(&self, index: usize) -> Duration {
        self.threads[index].runtime
    }

    /// What all are promised, in CPUs.
    pub(crate) fn share(&self) -> f64 {
        self.threads.iter().map(|held| held.runtime.div_duration_f64(self.period)).sum()
    }

    /// Promises a thread another runtime, and ends its rescue. Where the kernel
    /// refuses so much it stays as it was, and one that is rescued is, until there is
    /// room.
    ///
    /// # Errors
    /// Where the kernel fails us otherwise.
    pub(crate) fn set(&mut self, index: usize, runtime: Duration) -> Result<Answer, QosError> {
        let held = &mut self.threads[index];
        let change = runtime.abs_diff(held.runtime).div_duration_f64(self.period);
        if change < 0.001 && !held.is_rescued {
            return Ok(Answer::Done);
        }
        let before = std::mem::replace(&mut held.runtime, runtime);
        if let Err(error) = self.put(index) {
            self.threads[index].runtime = before;
            return match error.errno() {
                Some(errno::EBUSY) => Ok(Answer::Refused),
                Some(errno::ESRCH) => Ok(Answer::Gone),
                _ => Err(error.into()),
            };
        }
        self.threads[index].is_rescued = false;
        self.weigh()?;
        Ok(Answer::Done)
    }

    /// Lets a thread that used up its promise run on, ahead of all ordinary ones. Where
    /// that may not be it waits for its next period.
    pub(crate) fn rescue(&mut self, index: usize) {
        let held = &mut self.threads[index];
        if matches!(self.means, Means::Deadline { .. }) {
            held.is_rescued = held.task.schedule(Scheduling::ahead(RESCUE_PRIORITY)).is_ok();
        }
    }

    /// Whether a thread is being rescued.
    pub(crate) fn is_rescued(&self, index: usize) -> bool {
        self.threads[index].is_rescued
    }

    /// Adds a thread, promised the most that it may get. `false` where the kernel
    /// refuses.
    pub(crate) fn add(&mut self, task: Task) -> bool {
        self.threads.push(Held { task, runtime: self.max, is_rescued: false });
        let is_held = self.put(self.threads.len() - 1).is_ok();
        if !is_held {
            self.threads.pop();
        }
        is_held
    }

    /// Forgets a thread that has ended.
    pub(crate) fn forget(&mut self, index: usize) {
        self.threads.remove(index);
    }

    /// Raises threads that are new, and none of those that are held.
    pub(crate) fn raise_helpers(&self, helpers: &[Task]) {
        if self.means != Means::Weight {
            helpers.iter().for_each(|task| raise(*task));
        }
    }

    fn put(&self, index: usize) -> Result<(), KernelError> {
        let Means::Deadline { reclaim } = self.means else { return Ok(()) };
        let Held { task, runtime, .. } = &self.threads[index];
        task.reserve(Reservation { runtime: *runtime, period: self.period, reclaim })
    }

    fn weigh(&mut self) -> Result<(), QosError> {
        let most: f64 = self.max.as_secs_f64() * self.threads.len() as f64;
        let wanted: f64 = self.threads.iter().map(|held| held.runtime.as_secs_f64()).sum();
        match &mut self.group {
            Some(group) => group.weigh(wanted / most, most / self.period.as_secs_f64()),
            None => Ok(()),
        }
    }

    fn explain(&self, error: KernelError) -> QosError {
        let why = match error.errno() {
            Some(errno::EPERM) => {
                "the right CAP_SYS_NICE is missing, or the threads may not run on all CPUs \
                 (taskset, cpusets, pinned vCPUs)"
            }
            Some(errno::EBUSY) => "more CPU time than there is would be promised",
            _ => return error.into(),
        };
        QosError::NoDeadlines(format!("{why} ({error})"))
    }
}

/// The numbers of errors that mean something here.
mod errno {
    pub const EPERM: i32 = 1;
    pub const ESRCH: i32 = 3;
    pub const EBUSY: i32 = 16;
}

fn raise(task: Task) {
    let is_ordinary = |how: &Scheduling| how.policy == 0 && how.nice > HELPERS_NICE;
    if task.scheduling().is_ok_and(|how| is_ordinary(&how)) {
        // One that has ended, or is not ours, stays as it is.
        let _ = task.schedule(Scheduling::ordinary(HELPERS_NICE));
    }
}

/// Schedules a guest's threads as they were before; those that have ended need
/// nothing. One that the guest made since got what the thread has that made it.
pub fn give_back(entry: &Entry) {
    for task in &entry.saved {
        let _ = task.task().schedule(task.scheduling());
    }
    let Some(nice) = entry.helpers_nice.filter(|_| entry.process.is_alive()) else { return };
    let known: Vec<Task> = entry.saved.iter().map(SavedTask::task).collect();
    let raised = Scheduling::ordinary(HELPERS_NICE);
    for task in threads_of(entry.process.pid).into_iter().filter(|task| !known.contains(task)) {
        if task.scheduling().is_ok_and(|how| how == raised) {
            let _ = task.schedule(Scheduling::ordinary(nice));
        }
    }
}
