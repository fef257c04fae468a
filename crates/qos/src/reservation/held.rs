//! One thread that is held, and never another that has its number.

use dewar_kernel::{KernelError, Scheduling, Task};
use rustix::io::Errno;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Held {
    pub(super) task: Task,
    /// Tells it from a later thread with its number.
    pub(super) started: Option<u64>,
    pub(super) runtime: Duration,
    pub(super) state: State,
    /// Between these it must not come back.
    pub(super) out: Option<(Instant, Instant)>,
    /// What it had run when it was seen to run, or not to want to; and when.
    pub(super) seen: (Duration, Instant),
    /// The next rescue comes no sooner.
    pub(super) rescue_from: Option<Instant>,
    /// Whether it was rescued since that was asked last.
    pub(super) was_rescued: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Promised,
    Rescued { until: Instant },
    Waiting { since: Instant, nice: i32 },
}

impl Held {
    pub(super) fn new(task: Task, runtime: Duration) -> Self {
        let seen = (Duration::ZERO, Instant::now());
        let (state, rescue_from, was_rescued) = (State::Promised, None, false);
        let started = task.started();
        Self { task, started, runtime, state, out: None, seen, rescue_from, was_rescued }
    }

    /// Whether it is still the thread that it was.
    pub(super) fn is_there(&self) -> bool {
        self.started.is_some() && self.task.started() == self.started
    }

    /// Schedules it, if it is there.
    pub(super) fn schedule(&self, how: Scheduling) -> Result<(), KernelError> {
        self.there()?.schedule(how)
    }

    pub(super) fn there(&self) -> Result<Task, KernelError> {
        let Task { process, thread } = self.task;
        let gone = || {
            let what = format!("thread {thread} of process {process}");
            KernelError::new("schedule", what, Errno::SRCH)
        };
        self.is_there().then_some(self.task).ok_or_else(gone)
    }

    pub(super) fn must_stay_out(&self, now: Instant) -> bool {
        self.state != State::Promised
            && self.out.is_some_and(|(from, until)| from <= now && now < until)
    }

    /// Lets it wait until it can be put under its promise. Whatever it was before: it
    /// must not stay ahead of all others.
    pub(super) fn wait(&mut self, since: Instant, nice: i32) {
        let is_so = matches!(self.state, State::Waiting { nice: now, .. } if now == nice);
        if !is_so {
            let _ = self.schedule(Scheduling::ordinary(nice));
        }
        self.state = State::Waiting { since, nice };
    }
}
