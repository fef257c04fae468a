//! The job that is under way or will be.

use dewar_beat::End;
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

/// Whether `elapsed` is about the time of `jobs` jobs that ended so. After a silence it is
/// not: what ran meanwhile was no job's.
pub(super) fn is_of_jobs(elapsed: Duration, jobs: u32, ends: &[End], period: Duration) -> bool {
    let late = ends.iter().map(|end| match end {
        End::Met(_) => Some(Duration::ZERO),
        End::Missed(late) => *late,
    });
    // By how much it was late is not always told.
    let latest = late.collect::<Option<Vec<_>>>().and_then(|late| late.into_iter().max());
    latest.is_none_or(|late| elapsed <= late + period * (jobs + FAR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silence_is_told_from_a_long_job() {
        let (period, long) = (Duration::from_millis(20), Duration::from_millis(300));
        let is = |elapsed, jobs, end| is_of_jobs(elapsed, jobs, &[end], period);
        assert!(is(Duration::from_millis(25), 1, End::Met(Duration::ZERO)));
        assert!(!is(long, 1, End::Met(Duration::ZERO)));
        assert!(is(long, 15, End::Met(Duration::ZERO)));
        assert!(is(long, 1, End::Missed(Some(Duration::from_millis(280)))));
        assert!(!is(long, 1, End::Missed(Some(Duration::from_millis(5)))));
        assert!(is(long, 1, End::Missed(None)));
    }
}
