//! The laws that say how much CPU time a thread is promised in a period.
//!
//! A law is asked after each job, and tells the runtime for the periods to come.
//! Each thread of a guest has a law of its own: demand is the thread's, the
//! deadline is the guest's.

mod demand;
mod stepwise;
mod window;

pub use demand::Demand;
pub use stepwise::Stepwise;

use std::time::Duration;

/// Between what the runtime may lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// The time between two releases, and the reservation's period.
    pub period: Duration,
    /// The least runtime.
    pub min: Duration,
    /// The most.
    pub max: Duration,
}

/// What was seen of a job of the guest, for one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// The CPU time that the thread had since the job before was over; `None` where
    /// it cannot be told yet, being counted with a later job's.
    pub demand: Option<Duration>,
    /// How long ago that was.
    pub elapsed: Duration,
    /// Whether it met its deadline.
    pub met: bool,
    /// How long after its deadline it was done, where that is known.
    pub late: Option<Duration>,
    /// Whether the thread had more CPU time than it was promised.
    pub rescued: bool,
}

/// A rule for the runtime.
pub trait Law: Send {
    /// The runtime now.
    fn runtime(&self) -> Duration;

    /// Learns of a job.
    fn job(&mut self, job: &Job);

    /// Learns that the kernel promised no more than `granted`.
    fn refused(&mut self, granted: Duration);
}

impl Bounds {
    fn clamp(&self, runtime: Duration) -> Duration {
        runtime.clamp(self.min, self.max)
    }
}
