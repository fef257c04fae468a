//! The oracle: for every second the smallest reservation that meets all deadlines of that
//! second, found by replay of a run's jobs.
//!
//! What is replayed is a thread under `SCHED_DEADLINE` (Linux, `kernel/sched/deadline.c`:
//! a constant bandwidth server) of which nothing is known but what its admission promises:
//! its runtime in each period, at the end of it if need be. The server's period is the
//! jobs'. A job that begins when the last server period is over gets a new one; one that
//! needs more than a runtime goes on in the next. The smallest runtime is looked for by
//! halving; a second begins with what the one before left undone.

/// How exactly a reservation is looked for, of a CPU, and a time, in milliseconds.
const EXACT: f64 = 1e-4;

/// A job: when it was released, and the CPU time that it took, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Job {
    pub release: f64,
    pub demand: f64,
}

/// The server between two jobs.
#[derive(Debug, Clone, Copy, Default)]
struct Server {
    /// When its last period ends.
    deadline: f64,
    /// What is left of that period's runtime.
    runtime: f64,
}

/// The smallest share of a CPU for each second, with jobs that have `period` milliseconds
/// each. A second whose deadlines no reservation meets has 1.
pub fn least(jobs: &[Job], period: f64, seconds: usize) -> Vec<f64> {
    let mut server = Server::default();
    (0..seconds)
        .map(|second| {
            let within = |job: &&Job| ((job.release + EXACT) / 1e3) as usize == second;
            let jobs: Vec<Job> = jobs.iter().filter(within).copied().collect();
            let (mut low, mut high) = (0.0, 1.0);
            while high - low > EXACT {
                let middle = (low + high) / 2.0;
                match replay(server, &jobs, period, middle) {
                    Some(_) => high = middle,
                    None => low = middle,
                }
            }
            server = replay(server, &jobs, period, high).unwrap_or_default();
            high
        })
        .collect()
}

/// The server after these jobs, or none where one of them misses its deadline.
fn replay(mut server: Server, jobs: &[Job], period: f64, share: f64) -> Option<Server> {
    let full = share * period;
    for job in jobs {
        // What was left may be had where that is no more than was promised.
        let left = server.deadline - job.release;
        if left <= 0.0 || server.runtime / left > share {
            server = Server { deadline: job.release + period, runtime: full };
        }
        let mut demand = job.demand;
        while demand > server.runtime {
            demand -= server.runtime;
            server = Server { deadline: server.deadline + period, runtime: full };
            if server.deadline > job.release + period + EXACT {
                return None;
            }
        }
        server.runtime -= demand;
    }
    Some(server)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: f64 = 20.0;

    fn jobs(demands: &[f64]) -> Vec<Job> {
        let release = |nth: usize| nth as f64 * PERIOD;
        let job = |(nth, demand): (usize, &f64)| Job { release: release(nth), demand: *demand };
        demands.iter().enumerate().map(job).collect()
    }

    fn is(share: f64, wanted: f64) {
        assert!((share - wanted).abs() <= 2.0 * EXACT, "{share} is not {wanted}");
    }

    #[test]
    fn the_largest_job_of_a_second_decides() {
        let mut demands = vec![4.0; 100];
        demands[7] = 10.0;
        demands[70] = 15.0;
        let least = least(&jobs(&demands), PERIOD, 2);
        is(least[0], 0.5);
        is(least[1], 0.75);
    }

    #[test]
    fn jobs_released_together_share_a_period() {
        let pair = [Job { release: 0.0, demand: 5.0 }, Job { release: 0.0, demand: 7.0 }];
        is(least(&pair, PERIOD, 1)[0], 0.6);
    }

    #[test]
    fn what_no_reservation_meets_has_a_whole_cpu() {
        is(least(&jobs(&[25.0, 1.0]), PERIOD, 1)[0], 1.0);
    }

    #[test]
    fn a_second_without_jobs_needs_nothing() {
        is(least(&jobs(&[2.0]), PERIOD, 2)[1], 0.0);
    }
}
