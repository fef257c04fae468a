//! The loop: a job's end is heard, what its threads ran is read, the law says what
//! they are promised from now on.
//!
//! **Rescue.** The end of a job tells when the next one is released (its slack), so
//! the loop knows when a thread has had its promise. One that wants to run on then,
//! its job not done, would stand still until the next period, and miss. It goes ahead
//! of ordinary threads instead, until the job is done, or for as long as `max` leaves
//! in this period; then it is promised again, by then more. So a step of the load is
//! answered within the job that brings it.
//!
//! ```text
//!            job done                     job done
//! promised ───────────> promised (more) ────────────> …
//!     │ used up, job not done                ▲
//!     └──────────> rescued ──────────────────┘  or `max` reached
//! ```
//!
//! **Demand.** The run time of a thread is exact only while it does not run, so it is
//! read a moment after a job's end, when the thread waits for the next. Where it does
//! not wait, being late, its jobs are counted together with those after.

mod threads;

use crate::hold::{Answer, saved};
use crate::law::{Bounds, Demand, Job, Law, Stepwise};
use crate::weight::Group;
use crate::{Entry, Heartbeats, Hold, Ledger, Means, Owner, Promise, QosError, Seen};
use dewar_beat::{End, Line};
use dewar_kernel::{KernelError, Pid, ProcessHandle, Task};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};
use threads::Busy;
pub use threads::Subject;

/// After a job's end, until its thread waits for the next.
const SETTLES: Duration = Duration::from_micros(200);
/// How often it is told how the guest fares.
const TELL: Duration = Duration::from_secs(1);
/// How often a port that nobody is at is looked at again.
const LOOK: Duration = Duration::from_millis(100);
/// The time between two looks at a thread that may want more.
const PEEK: Duration = Duration::from_micros(500);
/// As many jobs at most are counted together.
const TOGETHER: u32 = 4;
/// Further ahead no release is believed, in periods.
const FAR: u32 = 4;

/// What a guest shall be given.
#[derive(Debug, Clone)]
pub struct Target {
    /// How much.
    pub promise: Promise,
    /// Whether by the paper's law.
    pub stepwise: bool,
    /// By what.
    pub means: Means,
    /// Whether more may be promised than there is.
    pub overcommit: bool,
}

/// Why a controller ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was told to.
    Stopped,
    /// The guest's process has ended.
    GuestEnded,
}

/// Gives one guest the CPU that its deadlines need. When it is dropped the guest's
/// threads are as they were.
pub struct Controller {
    ledger: Ledger,
    entry: Entry,
    subject: Subject,
    hold: Hold,
    laws: Vec<Box<dyn Law>>,
    counted: Vec<Counted>,
    heartbeats: Heartbeats,
    process: ProcessHandle,
    next: Option<NextJob>,
    busy: Busy,
    target: Target,
    told: Instant,
    /// Jobs and misses since then.
    since_told: (u64, u64),
}

/// What is known of a thread's run time.
#[derive(Debug, Clone, Copy)]
struct Counted {
    /// What it had run when that was told last, and when that was.
    ran: Duration,
    at: Instant,
    /// Jobs since then.
    jobs: u32,
}

/// The job that is under way or will be.
struct NextJob {
    release: Instant,
    /// When to look at the threads.
    look: Option<Instant>,
    /// For each thread, until when it is rescued, and when it may be again.
    rescue: Vec<Rescue>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Rescue {
    until: Option<Instant>,
    not_before: Option<Instant>,
}

impl Controller {
    /// Admits a guest and takes hold of its threads.
    ///
    /// # Errors
    /// Where it is not admitted, or the kernel refuses; then all is as it was.
    pub fn start(
        ledger: Ledger,
        subject: Subject,
        target: Target,
        heartbeats: Heartbeats,
    ) -> Result<Self, QosError> {
        let process = ProcessHandle::open(Pid(subject.process.pid))?;
        let mut busy = Busy::default();
        let tasks = subject.first_tasks(&mut busy, target.promise.threads);
        let helpers = subject.helpers(&tasks);
        let by_weight = target.means == Means::Weight;
        let plan = || Group::plan(subject.process.pid, &subject.name);
        let group = by_weight.then(plan).transpose()?;
        let own = Owner::of(std::process::id() as i32).ok_or_else(|| {
            let cause = std::io::Error::other("it cannot be read");
            KernelError::new("look at", "/proc/self", cause)
        })?;
        let entry = Entry {
            name: subject.name.clone(),
            process: subject.process,
            controller: own,
            promise: target.promise,
            law: if target.stepwise { "stepwise" } else { "demand" }.to_owned(),
            by: if by_weight { "weight" } else { "deadline" }.to_owned(),
            saved: saved(&tasks, &helpers),
            helpers_nice: subject.helpers_nice(),
            group: group.clone(),
            seen: Seen::default(),
        };
        ledger.admit(&entry, target.overcommit)?;
        let take = || -> Result<Hold, QosError> {
            group.as_ref().map_or(Ok(()), Group::make)?;
            Hold::take(&tasks, &helpers, &target.promise, target.means, group.clone())
        };
        let hold = take().inspect_err(|_| ledger.release(&entry))?;
        let now = Instant::now();
        let mut controller = Self {
            ledger,
            entry,
            subject,
            hold,
            laws: Vec::new(),
            counted: Vec::new(),
            heartbeats,
            process,
            next: None,
            busy,
            target,
            told: now,
            since_told: (0, 0),
        };
        tasks.iter().for_each(|task| controller.expect(*task));
        for index in 0..tasks.len() {
            let granted = controller.hold.runtime(index);
            if granted < controller.laws[index].runtime() {
                controller.laws[index].refused(granted);
            }
        }
        Ok(controller)
    }

    /// How the guest fares.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Goes on until `stop` can be read or the guest ends. `told` hears once a
    /// second how it fares.
    ///
    /// # Errors
    /// Where the kernel or the ledger fails us.
    pub fn run(
        &mut self,
        stop: BorrowedFd<'_>,
        mut told: impl FnMut(&Entry),
    ) -> Result<Ended, QosError> {
        loop {
            if let Some(ended) = self.wait(stop) {
                return Ok(ended);
            }
            let ends: Vec<End> = self.heartbeats.read().into_iter().filter_map(end_of).collect();
            if !ends.is_empty() {
                std::thread::sleep(SETTLES);
                self.learn(&ends)?;
            }
            self.look_after(Instant::now())?;
            if self.told.elapsed() >= TELL {
                self.tell()?;
                told(&self.entry);
            }
        }
    }

    /// A law and a beginning for a thread that was just taken.
    fn expect(&mut self, task: Task) {
        let Promise { min, max, miss, .. } = self.target.promise;
        let period = self.target.promise.period();
        let bounds = Bounds { period, min: period.mul_f64(min), max: period.mul_f64(max) };
        let law: Box<dyn Law> = match self.target.stepwise {
            true => Box::new(Stepwise::new(bounds)),
            false => Box::new(Demand::new(bounds, miss)),
        };
        self.laws.push(law);
        let ran = task.ran().unwrap_or_default();
        self.counted.push(Counted { ran, at: Instant::now(), jobs: 0 });
    }

    /// Waits for whatever comes next; says whether that is the end.
    fn wait(&self, stop: BorrowedFd<'_>) -> Option<Ended> {
        let now = Instant::now();
        let until = |at: Instant| at.saturating_duration_since(now);
        let mut timeout = TELL.saturating_sub(self.told.elapsed());
        if let Some(look) = self.next.as_ref().and_then(|next| next.look) {
            timeout = timeout.min(until(look));
        }
        let sources = self.heartbeats.sources();
        if !self.heartbeats.is_connected() || sources.is_empty() {
            timeout = timeout.min(LOOK);
        }
        let ends = [stop, self.process.as_fd()];
        let mut polled: Vec<PollFd<'_>> = ends
            .into_iter()
            .chain(sources)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // A signal is as good as a timeout.
        let _ = poll(&mut polled, Some(&timeout));
        if !polled[0].revents().is_empty() {
            return Some(Ended::Stopped);
        }
        (!polled[1].revents().is_empty()).then_some(Ended::GuestEnded)
    }

    /// Learns of jobs that are over, the last just now.
    fn learn(&mut self, ends: &[End]) -> Result<(), QosError> {
        let now = Instant::now();
        let seen = &mut self.entry.seen;
        let missed = ends.iter().filter(|end| matches!(end, End::Missed(_))).count() as u64;
        seen.jobs += ends.len() as u64;
        seen.missed += missed;
        self.since_told.0 += ends.len() as u64;
        self.since_told.1 += missed;
        let mut gone = Vec::new();
        for (index, task) in self.hold.tasks().collect::<Vec<_>>().into_iter().enumerate() {
            let Some(ran) = task.ran() else {
                gone.push(index);
                continue;
            };
            let counted = &mut self.counted[index];
            counted.jobs += ends.len() as u32;
            let (jobs, elapsed) = (counted.jobs, (now - counted.at) / counted.jobs);
            let is_exact = !task.is_runnable() || jobs >= TOGETHER;
            let demand = is_exact.then(|| ran.saturating_sub(counted.ran) / jobs);
            if is_exact {
                *counted = Counted { ran, at: now, jobs: 0 };
            }
            let rescued = self.hold.is_rescued(index);
            for end in ends {
                let (met, late) = match end {
                    End::Met(_) => (true, None),
                    End::Missed(late) => (false, *late),
                };
                self.laws[index].job(&Job { demand, elapsed, met, late, rescued });
            }
            match self.hold.set(index, self.laws[index].runtime())? {
                Answer::Done => {}
                Answer::Refused => {
                    self.entry.seen.refused += 1;
                    self.laws[index].refused(self.hold.runtime(index));
                }
                Answer::Gone => gone.push(index),
            }
        }
        self.next = ends.last().and_then(|end| self.next_job(*end, now));
        gone.into_iter().rev().for_each(|index| self.forget(index));
        Ok(())
    }

    /// When the next job is released: at the deadline of the one before.
    fn next_job(&self, end: End, now: Instant) -> Option<NextJob> {
        let period = self.target.promise.period();
        let release = match end {
            End::Met(before) => now + before.min(period * FAR),
            End::Missed(late) => now.checked_sub(late?.min(period * FAR))?,
        };
        let least = (0..self.hold.len()).map(|index| self.hold.runtime(index)).min()?;
        let look = Some(release.max(now) + least);
        Some(NextJob { release, look, rescue: vec![Rescue::default(); self.hold.len()] })
    }

    /// Rescues threads that have used up their promise though their job is not done,
    /// and ends what rescues have lasted long enough.
    fn look_after(&mut self, now: Instant) -> Result<(), QosError> {
        let Some(next) = &mut self.next else { return Ok(()) };
        if next.look.is_none_or(|look| now < look) {
            return Ok(());
        }
        let period = self.target.promise.period();
        let max = period.mul_f64(self.target.promise.max);
        let mut look: Option<Instant> = None;
        let mut at = |time: Instant| look = Some(look.map_or(time, |look| look.min(time)));
        let tasks: Vec<Task> = self.hold.tasks().collect();
        for (index, task) in tasks.into_iter().enumerate().take(next.rescue.len()) {
            let rescue = &mut next.rescue[index];
            let runtime = self.hold.runtime(index);
            if let Some(until) = rescue.until {
                if now < until {
                    at(until);
                    continue;
                }
                // Where there is no room now there is in a moment.
                match self.hold.set(index, runtime)? {
                    Answer::Refused => at(now + PEEK),
                    _ => rescue.until = None,
                }
            }
            let room = max.saturating_sub(runtime);
            if !task.is_runnable() {
                // Done, or waiting for something.
                if now < next.release + period {
                    at(now + PEEK);
                }
            } else if rescue.not_before.is_some_and(|time| now < time) {
                at(now + period / 8);
            } else if room > PEEK {
                self.hold.rescue(index);
                self.entry.seen.rescued += 1;
                *rescue = Rescue { until: Some(now + room), not_before: Some(now + period) };
                at(now + room);
            }
        }
        next.look = look;
        Ok(())
    }

    /// Once a second: new threads, and the ledger.
    fn tell(&mut self) -> Result<(), QosError> {
        let elapsed = self.told.elapsed();
        self.told = Instant::now();
        let tasks: Vec<Task> = self.hold.tasks().collect();
        let (used, busiest) = self.subject.busiest(&mut self.busy, elapsed, &tasks);
        let helpers = self.subject.helpers(&tasks);
        let more = busiest.filter(|_| tasks.len() < self.target.promise.threads);
        self.entry.saved.extend(saved(more.as_slice(), &[]));
        self.entry.seen.recent = std::mem::take(&mut self.since_told);
        self.entry.seen.reserved = self.hold.share();
        self.entry.seen.used = used;
        self.entry.seen.ignored = self.heartbeats.ignored();
        self.entry.seen.heard = self.entry.seen.recent.0 > 0;
        // Before they are touched.
        self.ledger.write(&self.entry)?;
        self.hold.raise_helpers(&helpers);
        if let Some(task) = more.filter(|task| self.hold.add(*task)) {
            self.expect(task);
            self.next = None;
        }
        Ok(())
    }

    fn forget(&mut self, index: usize) {
        self.hold.forget(index);
        self.laws.remove(index);
        self.counted.remove(index);
        self.next = None;
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.ledger.release(&self.entry);
    }
}

fn end_of(line: Line) -> Option<End> {
    match line {
        Line::Job { end, .. } => Some(end),
        // Nothing depends on them: the target is the host's to set.
        Line::Hello { .. } | Line::Rate(_) => None,
    }
}
