//! The last jobs' demands, and a quantile of them.

use std::collections::VecDeque;

/// How many jobs are remembered.
const JOBS: usize = 90;
/// So many in a row above the quantile: the load is another one now.
const HIGHER: usize = 3;
/// So many in a row below `FAR_BELOW` of the quantile, likewise.
const LOWER: usize = 30;
const FAR_BELOW: f64 = 0.9;

/// The last demands, in seconds, oldest first.
#[derive(Debug, Clone, Default)]
pub(super) struct Window {
    demands: VecDeque<f64>,
}

impl Window {
    /// Remembers a demand. Where the load has changed for good, what was before is
    /// forgotten; `usual` is the quantile that was told last.
    pub(super) fn push(&mut self, demand: f64, usual: f64) {
        self.demands.push_back(demand);
        if self.demands.len() > JOBS {
            self.demands.pop_front();
        }
        let last = |count: usize, holds: &dyn Fn(f64) -> bool| {
            self.demands.len() > count
                && self.demands.iter().rev().take(count).all(|demand| holds(*demand))
        };
        let keep = if last(HIGHER, &|demand| demand > usual) {
            HIGHER
        } else if last(LOWER, &|demand| demand < FAR_BELOW * usual) {
            LOWER
        } else {
            return;
        };
        self.demands.drain(..self.demands.len() - keep);
    }

    /// The largest.
    pub(super) fn max(&self) -> f64 {
        self.demands.iter().copied().fold(0.0, f64::max)
    }

    /// Counts none of those remembered as more than `most`.
    pub(super) fn cap(&mut self, most: f64) {
        self.demands.iter_mut().for_each(|demand| *demand = demand.min(most));
    }

    /// The demand that a share `q` of the jobs do not exceed; of few jobs, the
    /// largest.
    pub(super) fn quantile(&self, q: f64) -> Option<f64> {
        let mut sorted: Vec<f64> = self.demands.iter().copied().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let rank = (q * sorted.len() as f64).ceil().max(1.0) as usize;
        // One job in n is known to be the 1/n quantile only.
        sorted.get(rank.min(sorted.len()).checked_sub(1)?).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_of_the_last_jobs() {
        let mut window = Window::default();
        assert_eq!(window.quantile(0.9), None);
        // 1 to 80, in no order.
        (1..=80).for_each(|job| window.push(f64::from(job * 37 % 81), 75.0));
        assert_eq!(window.quantile(1.0), Some(80.0));
        assert_eq!(window.quantile(0.5), Some(40.0));
    }

    #[test]
    fn a_changed_load_is_seen_soon() {
        let mut window = Window::default();
        (0..90).for_each(|_| window.push(1.0, 1.0));
        (0..3).for_each(|_| window.push(2.0, 1.0));
        assert_eq!(window.quantile(0.5), Some(2.0));
        (0..30).for_each(|_| window.push(0.5, 2.0));
        assert_eq!(window.quantile(1.0), Some(0.5));
    }
}
