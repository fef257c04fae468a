//! Dewar's law: what the last jobs needed, plus a margin that the misses set.
//!
//! ```text
//! Q = clamp(F(1 − ε) · (1 + m) · b, min, max)
//! ```
//!
//! - **Feed-forward.** `F(q)` is the q-quantile of the CPU time that each of the
//!   last jobs took, ε the share of misses that is allowed. It rises with the third
//!   job of a new, higher load at the latest, with the first where ε is small; it
//!   falls when a second's jobs (or all that are remembered) took less: fast up,
//!   slow down.
//! - **Integral action.** A miss for want of CPU: `m ← m + g (1 − ε)`; a job that
//!   met its deadline: `m ← m − g ε`. So m stands still where the share of misses is
//!   ε (Robbins and Monro). It stays between its bounds, and does not rise while
//!   the runtime is at its bound or the kernel refused more: no wind-up. Nor by a
//!   job that took more than any that is remembered: that one is F's to answer.
//! - **Catching up.** `b`: a job that was late by L took L from the next, which must
//!   be done in `P − L`: b = P / (P − L), at most 2, for one job.
//!
//! What a thread *took* is what it needs only where it had time left over. A thread
//! that used all that it was promised needs an unknown amount. If its job met the
//! deadline that may be less, for what fills the time may be other work: the promise
//! sinks by 0.5 % a job, down to a floor. If it missed, the job counts as more, and
//! the promise that was too little sets the floor:
//!
//! ```text
//! miss:  floor ← Q (1 + g)        met:  floor ← floor (1 − g ε)
//! ```

use super::window::Window;
use super::{Bounds, Job, Law};
use std::time::Duration;

/// `g`: how much a miss adds to the margin.
const GAIN: f64 = 0.05;
/// The margin's bounds and beginning.
const MARGIN: std::ops::RangeInclusive<f64> = -0.10..=1.0;
const FIRST_MARGIN: f64 = 0.04;
/// The least margin where no miss is to be spared.
const FLOOR: f64 = 0.03;
/// An allowed share of misses from which on the margin may be below `FLOOR`.
const RELAXED: f64 = 0.02;
/// A thread that used so much of its promise used all of it.
const ALL: f64 = 0.98;
const MORE_THAN_ALL: f64 = 1.02;
/// What it is counted as then: a little less, or clearly more.
const LESS: f64 = 0.995;
const MORE: f64 = 1.25;
/// How the floor is forgotten while it is not needed.
const FORGET: f64 = 0.99;
/// The most that one late job raises the next one's runtime.
const MOST_CATCH_UP: f64 = 2.0;

/// A quantile of the demand, with a margin by the misses.
#[derive(Debug, Clone)]
pub struct Demand {
    bounds: Bounds,
    /// The share of misses that is allowed: ε.
    allowed: f64,
    window: Window,
    margin: f64,
    /// The least promise to a thread that uses all of it, in seconds.
    floor: f64,
    runtime: Duration,
    /// Whether the kernel refused the last runtime.
    is_refused: bool,
}

impl Demand {
    /// Begins with the most runtime: nothing is known yet.
    pub fn new(bounds: Bounds, allowed: f64) -> Self {
        Self {
            bounds,
            allowed: allowed.clamp(0.0, 0.5),
            window: Window::default(),
            margin: FIRST_MARGIN,
            floor: 0.0,
            runtime: bounds.max,
            is_refused: false,
        }
    }

    /// What the job needed, as far as can be told, in seconds.
    fn needed(&mut self, job: &Job, demand: f64, used_all: bool) -> f64 {
        let promised = self.runtime.as_secs_f64();
        match (used_all, job.met) {
            (false, _) => {
                self.floor *= FORGET;
                demand
            }
            (true, true) => {
                self.floor *= 1.0 - GAIN * self.allowed;
                let less = (LESS * promised).max(self.floor) / (1.0 + self.margin);
                // Those before are known no better.
                self.window.cap(less);
                less
            }
            (true, false) => {
                self.floor = self.floor.max(promised * (1.0 + GAIN));
                // Of what it had over several periods no more than it can have needed.
                demand.max(MORE * promised).min(2.0 * promised)
            }
        }
    }

    fn integrate(&mut self, met: bool, wants_cpu: bool) {
        let floor = if self.allowed < RELAXED { FLOOR } else { *MARGIN.start() };
        let saturated = self.is_refused || self.runtime >= self.bounds.max;
        let change = match met {
            true => -GAIN * self.allowed,
            false if wants_cpu && !saturated => GAIN * (1.0 - self.allowed),
            false => 0.0,
        };
        self.margin = (self.margin + change).clamp(floor, *MARGIN.end());
    }

    fn catch_up(&self, job: &Job) -> f64 {
        let period = self.bounds.period.as_secs_f64();
        let late = job.late.map_or(0.0, |late| late.as_secs_f64());
        if job.met || late == 0.0 {
            return 1.0;
        }
        (period / (period - late).max(1e-9)).clamp(1.0, MOST_CATCH_UP)
    }
}

impl Law for Demand {
    fn runtime(&self) -> Duration {
        self.runtime
    }

    fn job(&mut self, job: &Job) {
        let Some(demand) = job.demand else {
            if !job.met {
                self.runtime = self.bounds.clamp(self.runtime.mul_f64(MORE));
            }
            return;
        };
        let quantile = 1.0 - self.allowed;
        let usual = self.window.quantile(quantile).unwrap_or(f64::INFINITY);
        let periods = job.elapsed.div_duration_f64(self.bounds.period).max(1.0);
        let promised = self.runtime.as_secs_f64();
        let demand = demand.as_secs_f64();
        let most = promised * periods;
        let used_all = demand >= ALL * most && !job.rescued;
        // The kernel looks at its clock once a tick: more than all is what was needed.
        let used_all = used_all && !(job.met && demand > MORE_THAN_ALL * most);
        let is_news = demand > self.window.max();
        self.integrate(job.met, demand >= 0.9 * promised && !is_news);
        let needed = self.needed(job, demand, used_all);
        self.window.push(needed, usual);
        let Some(usual) = self.window.quantile(quantile) else { return };
        let wanted = usual * (1.0 + self.margin) * self.catch_up(job);
        self.runtime = self.bounds.clamp(Duration::from_secs_f64(wanted.max(0.0)));
        self.is_refused = false;
    }

    fn refused(&mut self, granted: Duration) {
        self.runtime = self.bounds.clamp(granted);
        self.is_refused = true;
    }
}
