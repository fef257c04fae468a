//! The job that is under way or will be.

use std::time::{Duration, Instant};

/// Further ahead no release is believed, in periods.
pub(super) const FAR: u32 = 4;

/// The job that is under way or will be.
pub(super) struct NextJob {
    /// When it can begin.
    pub(super) from: Instant,
    /// Its deadline.
    pub(super) deadline: Instant,
    /// When to look at the threads.
    pub(super) look: Option<Instant>,
}

impl NextJob {
    /// When the period ends, about, that a thread is in which was woken for this job.
    pub(super) fn end_of_period(&self, now: Instant, period: Duration) -> Instant {
        let late = now.saturating_duration_since(self.deadline);
        let periods = late.as_nanos().div_ceil(period.as_nanos().max(1));
        self.deadline + period * u32::try_from(periods).unwrap_or(FAR)
    }
}
