//! The paper's law: a step up when a deadline is missed, a step down when none was
//! missed for a while.
//!
//! ```text
//! miss:                     Q ← min(Q + step, max)
//! W jobs without a miss:    Q ← max(Q − step, min)
//! ```
//!
//! `step` is 1 % of the period; W is a second's jobs, since a step down every
//! period would miss a deadline every other.

use super::{Bounds, Job, Law};
use std::time::Duration;

/// One step up at a miss, one down after a quiet while.
#[derive(Debug, Clone)]
pub struct Stepwise {
    bounds: Bounds,
    runtime: Duration,
    step: Duration,
    /// Jobs without a miss after which it steps down.
    patience: u32,
    quiet: u32,
}

impl Stepwise {
    /// Begins with the least runtime.
    pub fn new(bounds: Bounds) -> Self {
        let a_second = Duration::from_secs(1).div_duration_f64(bounds.period).ceil();
        Self::with_patience(bounds, a_second as u32)
    }

    /// The same, stepping down after `patience` jobs without a miss.
    pub fn with_patience(bounds: Bounds, patience: u32) -> Self {
        let step = bounds.period / 100;
        Self { bounds, runtime: bounds.min, step, patience: patience.max(1), quiet: 0 }
    }
}

impl Law for Stepwise {
    fn runtime(&self) -> Duration {
        self.runtime
    }

    fn job(&mut self, job: &Job) {
        if !job.met {
            self.quiet = 0;
            self.runtime = self.bounds.clamp(self.runtime + self.step);
            return;
        }
        self.quiet += 1;
        if self.quiet >= self.patience {
            self.quiet = 0;
            self.runtime = self.bounds.clamp(self.runtime.saturating_sub(self.step));
        }
    }

    fn refused(&mut self, granted: Duration) {
        self.runtime = self.bounds.clamp(granted);
    }
}
