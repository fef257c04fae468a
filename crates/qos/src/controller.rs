//! The control loop. For each job that ends it reads the CPU time that the threads took, asks the law, and sets
//! the runtime that each thread is promised from now on.
//!
//! **Rescue.** The end of a job says when the next one is released. So the loop knows when a thread has used up
//! its promise. A thread whose job is not done then would wait for the next period and miss its deadline. The
//! loop lets it run ahead of ordinary threads instead, until the job is done or `max` is reached in this
//! period. After that the thread is promised CPU time again, more than before. So a step of the load is
//! answered within the first job that brings it.
//!
//! ```text
//!            job done                     job done
//! promised ───────────> promised (more) ────────────> …
//!     │ used up, job not done                ▲
//!     └──────────> rescued ──────────────────┘  or `max` reached
//! ```
//!
//! **Demand.** The run time of a thread is exact only while it sleeps. So the loop reads it a moment after the
//! job's end. A thread that is late does not sleep; its jobs are counted together with the next ones.

mod next_job;
mod publish;
mod thread_selection;

use crate::cgroup_weight::Group;
use crate::entry::BY_WEIGHT;
use crate::law::{Bounds, Demand, Job, Law, Stepwise};
use crate::ledger_writer::{LedgerWriter, Ticket};
use crate::reservation::{Answer, LEAST_RUNTIME};
use crate::{
    Entry, Heartbeats, Ledger, Mechanism, Owner, Port, Promise, QosError, Reservations, SavedTask,
    Seen, release,
};
use dewar_beat::{End, Line};
use dewar_kernel::{KernelError, Pid, ProcessHandle, Task};
use next_job::{FAR, NextJob, is_of_jobs};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};
use thread_selection::Busy;
pub use thread_selection::Subject;

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
/// A thread that had so much of its promise, and wants more, has had all: the kernel
/// takes off what it overran before.
const NEARLY_ALL: f64 = 0.75;

/// What a guest shall be given.
#[derive(Debug, Clone)]
pub struct Target {
    /// How much.
    pub promise: Promise,
    /// How it is found.
    pub law: LawKind,
    /// By what.
    pub means: Mechanism,
    /// Whether more may be promised than there is.
    pub overcommit: bool,
}

/// Which law.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LawKind {
    /// [`Demand`].
    Demand,
    /// [`Stepwise`].
    Stepwise {
        /// Jobs without a miss after which it steps down; a second's by default.
        patience: Option<u32>,
    },
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
    /// Ends before the entry is removed.
    ledger_writer: Option<LedgerWriter>,
    /// A thread that is taken hold of when that is written down.
    coming: Option<(SavedTask, Ticket)>,
    keeps_place: bool,
    subject: Subject,
    hold: Reservations,
    laws: Vec<Box<dyn Law>>,
    counted: Vec<Counted>,
    heartbeats: Heartbeats,
    process: ProcessHandle,
    next: Option<NextJob>,
    busy: Busy,
    target: Target,
    /// When it was last published how the guest fares.
    published: Instant,
    /// Jobs and misses since then.
    since_published: (u64, u64),
    /// When a rescue ends.
    tend: Option<Instant>,
}

/// What is known of a thread's run time.
#[derive(Debug, Clone, Copy)]
struct Counted {
    /// What it had run when that was told last, and when that was.
    ran: Duration,
    at: Instant,
    /// Jobs since then.
    jobs: u32,
    /// For how long it has not run at all.
    rested: Duration,
    /// The most that a job took since the guest was told of.
    most: Duration,
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
        port: Port,
    ) -> Result<Self, QosError> {
        let process = ProcessHandle::open(Pid(subject.process.pid))?;
        let mut busy = Busy::default();
        let tasks = subject.first_tasks(&mut busy, target.promise.threads, target.promise.period());
        let helpers = subject.helpers(&tasks);
        let by_weight = target.means == Mechanism::Weight;
        let processes = subject.processes();
        let plan = || Group::plan(subject.process.pid, &processes, &subject.name);
        let group = by_weight.then(plan).transpose()?;
        let own = Owner::of(std::process::id() as i32).ok_or_else(|| {
            let cause = std::io::Error::other("it cannot be read");
            KernelError::new("look at", "/proc/self", cause)
        })?;
        let mut entry = Entry {
            name: subject.name.clone(),
            scope: ledger.scope().to_owned(),
            process: subject.process,
            controller: own,
            promise: target.promise,
            law: target.law.name().to_owned(),
            by: if by_weight { BY_WEIGHT } else { "deadline" }.to_owned(),
            saved: Vec::new(),
            has_helpers: !helpers.is_empty(),
            group: group.clone(),
            limit: None,
            seen: Seen::default(),
        };
        let all: Vec<Task> = tasks.iter().chain(&helpers).copied().collect();
        ledger.admit(&mut entry, &all, target.overcommit)?;
        let take = || -> Result<(Heartbeats, Reservations), QosError> {
            // Only now: somebody else may have listened there.
            let heartbeats = Heartbeats::new(port, target.promise.rate)?;
            group.as_ref().map_or(Ok(()), |group| group.make(&subject.processes()))?;
            let means = target.means;
            let hold = Reservations::take(&tasks, &helpers, &target.promise, means, group.clone())?;
            Ok((heartbeats, hold))
        };
        let (heartbeats, hold) = take().inspect_err(|_| ledger.release(&entry))?;
        let now = Instant::now();
        let mut controller = Self {
            ledger_writer: Some(LedgerWriter::start(ledger.clone())),
            coming: None,
            keeps_place: false,
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
            published: now,
            since_published: (0, 0),
            tend: None,
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

    /// Ends; what the guest was promised stays promised, to it alone, until this
    /// process starts another controller of that name, releases the entry, or ends.
    pub fn keep_place(mut self) {
        self.keeps_place = true;
    }

    /// Goes on until `stop` can be read or the guest ends. `told` hears once a
    /// second how it fares.
    ///
    /// # Errors
    /// Where the kernel or the ledger fails us.
    pub fn run(
        &mut self,
        stop: BorrowedFd<'_>,
        mut report: impl FnMut(&Entry),
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
            let now = Instant::now();
            self.tend = self.hold.tend(now)?;
            self.look_after(now);
            if self.published.elapsed() >= TELL {
                self.publish();
                report(&self.entry);
            }
        }
    }

    /// A law and a beginning for a thread that was just taken.
    fn expect(&mut self, task: Task) {
        let Promise { min, max, miss, .. } = self.target.promise;
        let period = self.target.promise.period();
        let share = |share: f64| period.mul_f64(share).max(LEAST_RUNTIME);
        let bounds = Bounds { period, min: share(min), max: share(max) };
        let law: Box<dyn Law> = match self.target.law {
            LawKind::Demand => Box::new(Demand::new(bounds, miss)),
            LawKind::Stepwise { patience: None } => Box::new(Stepwise::new(bounds)),
            LawKind::Stepwise { patience: Some(jobs) } => {
                Box::new(Stepwise::with_patience(bounds, jobs))
            }
        };
        self.laws.push(law);
        let ran = task.ran().unwrap_or_default();
        let (rested, most) = (Duration::ZERO, Duration::ZERO);
        self.counted.push(Counted { ran, at: Instant::now(), jobs: 0, rested, most });
    }

    /// Waits for whatever comes next; says whether that is the end.
    fn wait(&self, stop: BorrowedFd<'_>) -> Option<Ended> {
        let now = Instant::now();
        let until = |at: Instant| at.saturating_duration_since(now);
        let mut timeout = TELL.saturating_sub(self.published.elapsed());
        let look = self.next.as_ref().and_then(|next| next.look);
        for at in [look, self.tend].into_iter().flatten() {
            timeout = timeout.min(until(at));
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
        self.since_published.0 += ends.len() as u64;
        self.since_published.1 += missed;
        let period = self.target.promise.period();
        let mut gone = Vec::new();
        for (index, task) in self.hold.tasks().collect::<Vec<_>>().into_iter().enumerate() {
            let Some(ran) = self.hold.ran(index) else {
                gone.push(index);
                continue;
            };
            let counted = &mut self.counted[index];
            counted.jobs += ends.len() as u32;
            let (jobs, elapsed) = (counted.jobs, (now - counted.at) / counted.jobs);
            let is_exact = !task.is_runnable() || jobs >= TOGETHER;
            let is_known = is_exact && is_of_jobs(now - counted.at, jobs, ends, period);
            let demand = is_known.then(|| ran.saturating_sub(counted.ran) / jobs);
            let rescued = is_exact && self.hold.was_rescued(index);
            if is_exact {
                let most = counted.most.max(demand.unwrap_or_default());
                *counted = Counted { ran, at: now, jobs: 0, most, ..*counted };
            }
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

    /// The next job: it is released at the deadline of the one before.
    fn next_job(&self, end: End, now: Instant) -> Option<NextJob> {
        let period = self.target.promise.period();
        let release = match end {
            End::Met(before) => now + before.min(period * FAR),
            End::Missed(late) => now.checked_sub(late?.min(period * FAR))?,
        };
        let from = release.max(now);
        let least = (0..self.hold.len()).map(|index| self.hold.runtime(index)).min()?;
        let look = self.may_rescue().then(|| from + least);
        Some(NextJob { from, deadline: release + period, look })
    }

    fn may_rescue(&self) -> bool {
        self.target.law == LawKind::Demand && self.target.means != Mechanism::Weight
    }

    /// Rescues threads that have had their promise though their job is not done.
    fn look_after(&mut self, now: Instant) {
        let Some(next) = &mut self.next else { return };
        if next.look.is_none_or(|look| now < look) {
            return;
        }
        let period = self.target.promise.period();
        let peek = PEEK.max(period / 32);
        let mut look: Option<Instant> = None;
        let mut at = |time: Instant| look = Some(look.map_or(time, |look| look.min(time)));
        let tasks: Vec<Task> = self.hold.tasks().collect();
        for (index, task) in tasks.into_iter().enumerate() {
            let runtime = self.hold.runtime(index);
            let due = next.from + runtime;
            if now < due {
                at(due);
                continue;
            }
            let had = task.ran().unwrap_or_default().saturating_sub(self.counted[index].ran);
            // One that has not had it waits for others that have reservations.
            if task.is_runnable() && had >= runtime.mul_f64(NEARLY_ALL) {
                if self.hold.rescue(index, now, had, next.end_of_period(now, period)) {
                    self.entry.seen.rescued += 1;
                    self.tend = Some(now);
                }
                at(now + period / 8);
            } else if now < next.deadline {
                // Done, or waiting for something.
                at(now + peek);
            }
        }
        next.look = look.filter(|_| now < next.deadline + period * FAR);
    }

    fn forget(&mut self, index: usize) {
        self.hold.forget(index);
        self.laws.remove(index);
        self.counted.remove(index);
        // Of a program that makes a thread for each of its jobs there would be ever more.
        self.entry.saved.retain(|saved| !saved.has_ended());
        self.next = None;
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        // Before anything that may wait for a disk.
        release(&self.entry);
        self.ledger_writer = None;
        if !self.keeps_place {
            self.ledger.release(&self.entry);
        } else if let Some(group) = &self.entry.group {
            group.dissolve();
        }
    }
}

impl LawKind {
    fn name(self) -> &'static str {
        match self {
            Self::Demand => "demand",
            Self::Stepwise { .. } => "stepwise",
        }
    }
}

fn end_of(line: Line) -> Option<End> {
    match line {
        Line::Job { end, .. } => Some(end),
        // Nothing depends on them: the target is the host's to set.
        Line::Hello { .. } | Line::Rate(_) => None,
    }
}
