//! What is written down of a guest that is promised CPU time.

use crate::cgroup_weight::Group;
use dewar_kernel::{KernelError, Reservation, Scheduling, Task};
use dewar_registry::ProcessId;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A process that is given CPU time, or gives it.
pub type Owner = ProcessId;

/// What a guest is promised.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Promise {
    /// Jobs a second.
    pub rate: f64,
    /// The share of jobs that may miss their deadlines.
    pub miss: f64,
    /// The least share of a CPU for each thread.
    pub min: f64,
    /// The most.
    pub max: f64,
    /// How many threads may have it.
    pub threads: usize,
}

/// What was seen of a guest until now.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// What its threads are promised now, in CPUs.
    pub reserved: f64,
    /// What it used in the last second, in CPUs.
    pub used: f64,
    /// What it needs, in CPUs: as much as that second's largest job took, in each period.
    #[serde(default)]
    pub demand: f64,
    /// Jobs since the beginning.
    pub jobs: u64,
    /// Those that missed their deadlines.
    pub missed: u64,
    /// Jobs and misses of the last second or so.
    pub recent: (u64, u64),
    /// How often a thread was let run on to finish its job.
    pub rescued: u64,
    /// How often the kernel refused more.
    pub refused: u64,
    /// What it said that was passed over.
    pub ignored: u64,
    /// Whether it says anything.
    pub heard: bool,
}

/// How a thread was scheduled before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedTask {
    process: i32,
    thread: i32,
    /// In clock ticks from boot.
    started: u64,
    policy: u32,
    nice: i32,
    priority: u32,
    resets_on_fork: bool,
    /// Runtime and period in nanoseconds, and whether it reclaims.
    reservation: Option<(u64, u64, bool)>,
}

/// What [`Entry::by`] says where CPU time is a control group's: that takes nothing from
/// what can be promised to others.
pub const BY_WEIGHT: &str = "weight";

/// A guest's entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Tells the root that it is under from others.
    #[serde(default)]
    pub scope: String,
    /// Its process.
    pub process: Owner,
    /// The process that gives it CPU time.
    pub controller: Owner,
    /// What it is promised.
    pub promise: Promise,
    /// `demand` or `stepwise`.
    pub law: String,
    /// `deadline` or `weight`.
    pub by: String,
    /// How its threads were before.
    pub saved: Vec<SavedTask>,
    /// Whether its other threads were raised: a VM's.
    pub has_helpers: bool,
    /// The control group that was made for it.
    pub group: Option<Group>,
    /// How many CPUs can be promised, as it was when it was admitted by deadlines.
    #[serde(default)]
    pub limit: Option<f64>,
    /// How it fares.
    pub seen: Seen,
}

impl Promise {
    /// The time between two jobs.
    pub fn period(&self) -> Duration {
        Duration::from_secs_f64(1.0 / self.rate)
    }

    /// What it may get at most, in CPUs.
    pub fn most(&self) -> f64 {
        self.max * self.threads as f64
    }
}

impl SavedTask {
    /// How a thread is scheduled now; `None` where it has ended.
    pub fn of(task: Task) -> Option<Self> {
        let Scheduling { policy, nice, priority, reservation, resets_on_fork } =
            task.scheduling().ok()?;
        let nanoseconds = |time: Duration| time.as_nanos() as u64;
        let reservation =
            reservation.map(|it| (nanoseconds(it.runtime), nanoseconds(it.period), it.reclaim));
        let (Task { process, thread }, started) = (task, task.started()?);
        Some(Self { process, thread, started, policy, nice, priority, resets_on_fork, reservation })
    }

    /// The thread.
    pub fn task(&self) -> Task {
        Task { process: self.process, thread: self.thread }
    }

    /// Whether it had a reservation then.
    pub fn has_reservation(&self) -> bool {
        self.reservation.is_some()
    }

    /// Whether that is still the thread that it was.
    pub fn is_there(&self) -> bool {
        self.task().started() == Some(self.started)
    }

    /// Whether it is known to have ended. One that cannot be looked at, for want of
    /// descriptors say, is still to be given back.
    pub fn has_ended(&self) -> bool {
        let gone = |error: KernelError| error.errno() == Some(Errno::SRCH.raw_os_error());
        match self.task().started() {
            Some(started) => started != self.started,
            None => self.task().scheduling().is_err_and(gone),
        }
    }

    /// How it was.
    pub fn scheduling(&self) -> Scheduling {
        let reservation = self.reservation.map(|(runtime, period, reclaim)| Reservation {
            runtime: Duration::from_nanos(runtime),
            period: Duration::from_nanos(period),
            reclaim,
        });
        let Self { policy, nice, priority, resets_on_fork, .. } = *self;
        Scheduling { policy, nice, priority, reservation, resets_on_fork }
    }
}

impl Entry {
    /// What a VM's first thread was at, and so what it makes.
    pub fn helpers_nice(&self) -> Option<i32> {
        let first = |saved: &&SavedTask| saved.thread == self.process.pid;
        let saved = self.saved.iter().find(first).filter(|_| self.has_helpers)?;
        Some(saved.nice)
    }

    /// Whether any of these threads is in its hands.
    pub fn has_any(&self, tasks: &[Task]) -> bool {
        self.saved.iter().any(|saved| saved.is_there() && tasks.contains(&saved.task()))
    }
}
