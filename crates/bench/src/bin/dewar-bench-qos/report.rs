//! What a run gave, and the oracle beside it.

use crate::load::{Load, LoadKind, PERIOD_MS, RATE};
use crate::oracle::{self, Job};
use crate::run::SubjectKind;
use crate::way::Way;
use anyhow::Result;
use dewar_testkit::LoggedJob;
use serde_json::{Value, json};
use std::path::Path;

/// Jobs at the beginning that are not counted: a way must first be in force.
const BEGINNING: u64 = 30;
/// So many misses are told one by one.
const FEW: usize = 5;
/// So many jobs in a row that meet their deadlines: it has settled.
const IN_A_ROW: u64 = 5;

pub struct Row {
    pub subject: SubjectKind,
    pub load: LoadKind,
    pub way: Way,
    /// Jobs and misses of each second.
    pub seconds: Vec<(u64, u64)>,
    /// The reservation over time: seconds and CPUs.
    pub shares: Vec<(f64, f64)>,
    /// For every second the smallest reservation that meets its deadlines.
    pub oracle: Vec<f64>,
    jobs: Vec<LoggedJob>,
    starts: Vec<u64>,
    hogs_had: f64,
    elapsed: f64,
}

impl Row {
    pub fn new(
        subject: SubjectKind,
        load: &Load,
        way: &Way,
        jobs: Vec<LoggedJob>,
        shares: Vec<(f64, f64)>,
        hogs_had: f64,
        elapsed: f64,
    ) -> Self {
        let mut seconds = vec![(0, 0); load.seconds().ceil() as usize];
        for job in &jobs {
            if let Some(second) = seconds.get_mut((job.number as f64 / RATE) as usize) {
                second.0 += 1;
                second.1 += u64::from(missed(job));
            }
        }
        let mut starts = vec![0];
        if load.kind != LoadKind::Film {
            let mut at = 0.0;
            for (length, _) in &load.steps {
                at += (length * RATE).round();
                starts.push(at as u64);
            }
        }
        let shares = shares.into_iter().filter(|(at, _)| *at < load.seconds()).collect();
        Self {
            subject,
            load: load.kind,
            way: way.clone(),
            seconds,
            shares,
            oracle: Vec::new(),
            jobs,
            starts,
            hogs_had,
            elapsed,
        }
    }

    fn counted(&self) -> impl Iterator<Item = &LoggedJob> {
        self.jobs.iter().filter(|job| job.number >= BEGINNING)
    }

    /// The share of jobs that missed.
    pub fn missed(&self) -> f64 {
        let misses = self.counted().filter(|job| missed(job)).count();
        misses as f64 / self.counted().count().max(1) as f64
    }

    /// Misses a second or more after a step, of all.
    pub fn missed_late(&self) -> usize {
        let since_step = |job: &LoggedJob| {
            let start = self.starts.iter().rev().find(|start| **start <= job.number);
            job.number - start.copied().unwrap_or(0)
        };
        self.counted().filter(|job| missed(job) && since_step(job) as f64 >= RATE).count()
    }

    /// Jobs after a step until so many in a row meet their deadlines, the worst of all
    /// steps.
    pub fn settling(&self) -> u64 {
        let met = |number: u64| {
            self.jobs.get(number as usize).is_none_or(|job| number < BEGINNING || !missed(job))
        };
        let settled = |start: &u64| {
            (*start..).find(|from| (*from..from + IN_A_ROW).all(met)).unwrap_or(*start) - start
        };
        self.starts.iter().map(settled).max().unwrap_or(0)
    }

    /// The reservation on average, in CPUs.
    pub fn reserved(&self) -> f64 {
        let counted = || self.shares.iter().filter(|(at, _)| *at * RATE >= BEGINNING as f64);
        counted().map(|(_, share)| share).sum::<f64>() / counted().count().max(1) as f64
    }

    /// The same over that of the oracle.
    pub fn over_oracle(&self) -> f64 {
        let oracle = self.oracle.iter().skip(1);
        self.reserved() / (oracle.clone().sum::<f64>() / oracle.count().max(1) as f64)
    }

    /// What the hogs had, of what the task's own need leaves of two CPUs.
    pub fn hogs_share(&self) -> f64 {
        let cpus = std::thread::available_parallelism().map_or(1.0, |cpus| cpus.get() as f64);
        let need: f64 = self.oracle.iter().sum();
        self.hogs_had / (cpus * self.elapsed - need)
    }

    pub fn print(&self) {
        println!(
            "{:<8} {:<6} {:<34} missed {:>5.1} %  reserved {:>5.1} %",
            self.subject.name(),
            self.load.name(),
            self.way.name(),
            100.0 * self.missed(),
            100.0 * self.reserved(),
        );
        let few: Vec<&LoggedJob> = self.counted().filter(|job| missed(job)).collect();
        for job in few.iter().filter(|_| few.len() <= FEW) {
            println!(
                "    job {} was done after {:.1} ms, of which it ran for {:.1}",
                job.number,
                job.response_us as f64 / 1e3,
                job.cpu_us as f64 / 1e3
            );
        }
    }
}

fn missed(job: &LoggedJob) -> bool {
    job.response_us as f64 > PERIOD_MS * 1e3
}

/// Gives the rows of a load their oracle: from the jobs of runs before all others, each job
/// with the least that it took.
pub fn add_oracles(rows: &mut [Row], ahead: &[Row]) {
    let Some(of) = ahead.first() else { return };
    let least = |job: &LoggedJob| {
        let all = ahead.iter().flat_map(|row| &row.jobs);
        let its = all.filter(|it| it.number == job.number).map(|it| it.cpu_us);
        its.min().unwrap_or(job.cpu_us)
    };
    let job = |job: &LoggedJob| Job {
        release: job.number as f64 * PERIOD_MS,
        demand: least(job) as f64 / 1e3,
    };
    let jobs: Vec<Job> = of.jobs.iter().map(job).collect();
    let oracle = oracle::least(&jobs, PERIOD_MS, of.seconds.len());
    let its = rows.iter_mut().filter(|row| row.subject == of.subject && row.load == of.load);
    its.for_each(|row| row.oracle.clone_from(&oracle));
}

pub fn save(path: &Path, rows: &[Row]) -> Result<()> {
    let rows: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "subject": row.subject.name(), "load": row.load.name(), "way": row.way.name(),
                "missed": row.missed(), "missed_a_second_after_a_step": row.missed_late(),
                "settling_periods": row.settling(), "reserved_cpus": row.reserved(),
                "over_oracle": row.over_oracle(), "hogs_share": row.hogs_share(),
                "misses_by_second": row.seconds.iter().map(|it| it.1).collect::<Vec<_>>(),
            })
        })
        .collect();
    std::fs::write(path, serde_json::to_string_pretty(&json!({"rows": rows}))? + "\n")?;
    Ok(())
}
