//! Threads under a reservation, and how they get out of it.
//!
//! How a thread was scheduled before is written down ([`SavedTask`]) before it is
//! touched; [`release`] undoes it from that alone, in any process.
//!
//! ```text
//!                 rescue                     time is up, or the job is done
//!  Promised ───────────────> Rescued ─────────────────────────────┐
//!     ▲  ▲                  (SCHED_FIFO)                           │
//!     │  └────────────────── there is room, in time ───────────────┤
//!     └─── there is room, and it is safe ─── Waiting <── else ─────┘
//!                                         (ordinary)
//! ```
//!
//! The kernel keeps the bandwidth of a thread that left `SCHED_DEADLINE` until its
//! deadline, so there may be no room to come back at once. A rescue ends nevertheless.
//!
//! **A thread that would never run again.** Kernel bug: a thread that leaves SCHED_DEADLINE with
//! its runtime exhausted, as a rescued one does, and rejoins too early is never scheduled again
//! ([`dewar_kernel::Task`]'s module tells when). We know its deadline only approximately: one
//! period after its job was released. So a rescue that ends late waits until the overrun is worked
//! off. A promised thread that wants to run and was not scheduled for longer than a period is taken
//! out of the class and put back.

mod back;
mod held;
mod limits;

pub use back::{end_rescues, release};
use held::{Held, State};
use limits::{HELPERS_NICE, LEAVES_WITHIN, RESCUE_PRIORITY, ROOM_AGAIN};

use crate::cgroup_weight::Group;
use crate::{Promise, QosError};
use dewar_kernel::{KernelError, Reservation, Scheduling, Task};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// What a thread runs at that must stay out of its reservation for a while: nobody
/// else has to pay for that.
const OUTSIDE_NICE: i32 = 0;
/// A shorter one is not worth two changes of the class.
const SHORTEST_RESCUE: Duration = Duration::from_micros(500);
/// By so much a guess of a thread's deadline may be too late, where its period is not
/// short; a 32nd of it where it is.
const DEADLINE_ERROR: Duration = Duration::from_millis(1);
/// One that overran keeps it for some periods more; for so long at most the least is waited
/// for, rather than to give up.
const OVERRUN_CHARGE_MAX: Duration = Duration::from_secs(2);
/// The longest time between two ticks (HZ=100): a thread may overrun that much.
const TICK: Duration = Duration::from_millis(10);
/// The run time of a thread that runs may be old by so much.
const RUNTIME_STALENESS: Duration = Duration::from_millis(40);
/// The kernel takes no runtime below 1,024 ns.
pub(crate) const LEAST_RUNTIME: Duration = Duration::from_micros(10);
/// Periods that a thread stays out at most, whatever it overran.
const OUT: u32 = 8;

/// How CPU time is promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mechanism {
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
pub struct Reservations {
    period: Duration,
    min: Duration,
    max: Duration,
    means: Mechanism,
    threads: Vec<Held>,
    group: Option<Group>,
    /// When it is next looked whether all get what they are promised.
    look_at: Instant,
}

impl Reservations {
    /// Takes hold of threads: each is promised the most that it may get, or as much of
    /// that as the kernel gives.
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub(crate) fn take(
        tasks: &[Task],
        helpers: &[Task],
        promise: &Promise,
        means: Mechanism,
        group: Option<Group>,
    ) -> Result<Self, QosError> {
        let period = promise.period();
        let share = |share: f64| period.mul_f64(share).max(LEAST_RUNTIME);
        let (min, max) = (share(promise.min), share(promise.max));
        let threads = tasks.iter().map(|task| Held::new(*task, max)).collect();
        let look_at = Instant::now();
        let mut hold = Self { period, min, max, means, threads, group, look_at };
        for index in 0..hold.threads.len() {
            hold.begin(index, look_at)?;
        }
        if hold.means != Mechanism::Weight {
            helpers.iter().for_each(|task| raise(*task));
        }
        hold.weigh()?;
        Ok(hold)
    }

    /// Promises a thread the most that it may get, or what there is of that. What others
    /// give back is waited for from `since` on, for all threads together.
    fn begin(&mut self, index: usize, since: Instant) -> Result<(), QosError> {
        let lingers = (self.period * OUT).clamp(LEAVES_WITHIN, OVERRUN_CHARGE_MAX);
        loop {
            let Err(error) = self.put(index) else { return Ok(()) };
            let is_busy = errno(&error) == Some(Errno::BUSY);
            let (waited, less) = (since.elapsed(), self.threads[index].runtime / 2);
            if is_busy && waited >= LEAVES_WITHIN && less >= self.min {
                self.threads[index].runtime = less;
            } else if is_busy && waited < lingers {
                std::thread::sleep(ROOM_AGAIN);
            } else {
                return Err(self.explain(error));
            }
        }
    }

    /// How many threads.
    pub(crate) fn len(&self) -> usize {
        self.threads.len()
    }

    /// What a thread has run; `None` where it has ended.
    pub(crate) fn ran(&self, index: usize) -> Option<Duration> {
        let held = &self.threads[index];
        held.task.ran().filter(|_| held.is_there())
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
    /// refuses to raise it, it stays as it was.
    ///
    /// # Errors
    /// Where the kernel fails us otherwise.
    pub(crate) fn set(&mut self, index: usize, runtime: Duration) -> Result<Answer, QosError> {
        let held = &mut self.threads[index];
        let change = runtime.abs_diff(held.runtime).div_duration_f64(self.period);
        if change < 0.001 && held.state == State::Promised {
            return Ok(Answer::Done);
        }
        let before = std::mem::replace(&mut held.runtime, runtime);
        let answer = self.promise(index)?;
        if answer == Answer::Refused {
            // What it has; or what it asked for last, which is less and less.
            let held = &mut self.threads[index];
            held.runtime = match held.state {
                State::Promised => before,
                _ => runtime.min(before),
            };
        }
        self.weigh()?;
        Ok(answer)
    }

    /// Puts a thread under its promise. One that is not there yet, and may not be,
    /// waits.
    fn promise(&mut self, index: usize) -> Result<Answer, QosError> {
        let now = Instant::now();
        if self.threads[index].must_stay_out(now) {
            self.threads[index].wait(now, OUTSIDE_NICE);
            return Ok(Answer::Done);
        }
        let Err(error) = self.put(index) else {
            let held = &mut self.threads[index];
            (held.state, held.out) = (State::Promised, None);
            held.seen = (held.task.ran().unwrap_or_default(), now);
            return Ok(Answer::Done);
        };
        match errno(&error) {
            // No room; or somebody bound it to some CPUs since it was taken hold of.
            Some(Errno::BUSY | Errno::PERM) => {}
            Some(Errno::SRCH) => {
                // There is nothing to end any more.
                self.threads[index].state = State::Promised;
                return Ok(Answer::Gone);
            }
            _ => return Err(error.into()),
        }
        if let State::Rescued { .. } = self.threads[index].state {
            self.threads[index].wait(now, HELPERS_NICE);
        }
        Ok(Answer::Refused)
    }

    /// Lets a thread that used up its promise run on, ahead of all ordinary ones, for
    /// what the most that it may have leaves in this period; once in a period. Where
    /// that may not be it waits for its next. `had` is what it ran since its job was
    /// released, `deadline` about when its period ends. Says whether it is.
    pub(crate) fn rescue(
        &mut self,
        index: usize,
        now: Instant,
        had: Duration,
        deadline: Instant,
    ) -> bool {
        let guess = DEADLINE_ERROR.min(self.period / 32);
        let held = &mut self.threads[index];
        // It is to be back before its deadline.
        let left = deadline.saturating_duration_since(now).saturating_sub(2 * guess);
        let room = self.max.saturating_sub(held.runtime).min(left);
        let may = held.state == State::Promised
            && held.rescue_from.is_none_or(|from| now >= from)
            && matches!(self.means, Mechanism::Deadline { .. })
            && room >= SHORTEST_RESCUE;
        if !may || held.schedule(Scheduling::ahead(RESCUE_PRIORITY)).is_err() {
            return false;
        }
        let overran = had.saturating_sub(held.runtime) + TICK;
        let longer = overran.mul_f64(self.period.div_duration_f64(held.runtime));
        let until = deadline + longer.min(self.period * OUT);
        held.out = deadline.checked_sub(guess).map(|from| (from, until));
        held.state = State::Rescued { until: now + room };
        held.rescue_from = Some(now + self.period);
        held.was_rescued = true;
        true
    }

    /// Ends rescues whose time is up, brings those back that wait, and helps those that
    /// do not get what they are promised. Says when to look again.
    ///
    /// # Errors
    /// Where the kernel fails us.
    pub(crate) fn tend(&mut self, now: Instant) -> Result<Option<Instant>, QosError> {
        let mut next = self.look_for_stuck(now);
        for index in 0..self.threads.len() {
            match self.threads[index].state {
                State::Promised => continue,
                State::Rescued { until } if now < until => {}
                State::Rescued { .. } => drop(self.promise(index)?),
                State::Waiting { since, nice } => {
                    let held = &mut self.threads[index];
                    let is_long = now - since > self.period && !held.must_stay_out(now);
                    if is_long && held.runtime / 2 >= self.min {
                        // Somebody else has it now.
                        held.runtime /= 2;
                        held.state = State::Waiting { since: now, nice };
                    }
                    self.promise(index)?;
                }
            }
            let at = match self.threads[index].state {
                State::Promised => continue,
                State::Rescued { until } => until,
                State::Waiting { .. } => now + ROOM_AGAIN,
            };
            next = Some(next.map_or(at, |next| next.min(at)));
        }
        Ok(next)
    }

    /// Takes those out of the class that want to run and have not for more than a
    /// period. Says when to look again.
    fn look_for_stuck(&mut self, now: Instant) -> Option<Instant> {
        if self.means == Mechanism::Weight {
            return None;
        }
        // Who has used up its runtime stands still for a period at most.
        let long = self.period * 5 / 4 + RUNTIME_STALENESS;
        if now < self.look_at {
            return Some(self.look_at);
        }
        self.look_at = now + long;
        for held in self.threads.iter_mut().filter(|held| held.state == State::Promised) {
            let Some(ran) = held.task.ran() else { continue };
            if ran != held.seen.0 || !held.task.is_runnable() {
                held.seen = (ran, now);
            } else if now - held.seen.1 >= long {
                held.wait(now, OUTSIDE_NICE);
            }
        }
        Some(self.look_at)
    }

    /// Whether a thread was rescued since this was asked last.
    pub(crate) fn was_rescued(&mut self, index: usize) -> bool {
        std::mem::take(&mut self.threads[index].was_rescued)
    }

    /// Whether any is.
    pub(crate) fn any_is_rescued(&self) -> bool {
        self.threads.iter().any(|held| matches!(held.state, State::Rescued { .. }))
    }

    /// Adds a thread, promised the most that it may get. `false` where the kernel
    /// refuses.
    pub(crate) fn add(&mut self, task: Task) -> bool {
        self.threads.push(Held::new(task, self.max));
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
        if self.means != Mechanism::Weight {
            helpers.iter().for_each(|task| raise(*task));
        }
    }

    fn put(&self, index: usize) -> Result<(), KernelError> {
        let Mechanism::Deadline { reclaim } = self.means else { return Ok(()) };
        let held = &self.threads[index];
        let (runtime, period) = (held.runtime, self.period);
        held.there()?.reserve(Reservation { runtime, period, reclaim })
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
        let why = match errno(&error) {
            Some(Errno::PERM) => {
                "the right CAP_SYS_NICE is missing, or the threads may not run on all CPUs \
                 (taskset, cpusets, pinned vCPUs)"
            }
            Some(Errno::BUSY) => return QosError::Busy(error.to_string()),
            _ => return error.into(),
        };
        QosError::NoDeadlines(format!("{why} ({error})"))
    }
}

fn errno(error: &KernelError) -> Option<Errno> {
    error.errno().map(Errno::from_raw_os_error)
}

fn raise(task: Task) {
    let is_ordinary = |how: &Scheduling| how.policy == 0 && how.nice > HELPERS_NICE;
    if task.scheduling().is_ok_and(|how| is_ordinary(&how)) {
        // One that has ended, or is not ours, stays as it is.
        let _ = task.schedule(Scheduling::ordinary(HELPERS_NICE));
    }
}

#[cfg(test)]
mod tests;
