//! Load for tests of CPU time: programs that take all they can get, and one that
//! has a deadline for each of its jobs.

use crate::guest_files;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Programs that burn CPU time until they are dropped.
#[derive(Debug)]
pub struct Hogs {
    children: Vec<Child>,
}

/// A process that hashes blocks with a deadline for each
/// (`crates/beat/examples/hashes.rs`).
#[derive(Debug)]
pub struct PeriodicTask {
    child: Child,
    log: PathBuf,
}

/// A job, as the program logged it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedJob {
    /// Its number.
    pub number: u64,
    /// The block that was hashed.
    pub bytes: u64,
    /// How long after its release it was done, in microseconds.
    pub response_us: u64,
    /// The CPU time that it took, in microseconds.
    pub cpu_us: u64,
}

impl Hogs {
    /// Starts so many.
    ///
    /// # Errors
    /// Where a shell cannot be started.
    pub fn start(count: usize) -> Result<Self> {
        let mut hogs = Self { children: Vec::new() };
        for _ in 0..count {
            let mut shell = Command::new("sh");
            shell.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
            hogs.children.push(shell.spawn().context("sh")?);
        }
        Ok(hogs)
    }

    /// Their processes.
    pub fn pids(&self) -> Vec<i32> {
        self.children.iter().map(|child| child.id() as i32).collect()
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl PeriodicTask {
    /// Starts it: so many jobs a second, in steps of seconds and bytes, telling its
    /// heartbeats to `port`. It waits until the port is there.
    ///
    /// # Errors
    /// Where it was not built or cannot be started.
    pub fn start(rate: f64, steps: &[(f64, u64)], port: &Path, log: &Path) -> Result<Self> {
        let program = guest_files()?.0.with_file_name("more/bin/hashes");
        ensure!(program.exists(), "{}: 'make guest' builds it", program.display());
        let child = Command::new(program)
            .arg(rate.to_string())
            .arg(log)
            .args(step_words(steps))
            .env("DEWAR_BEAT", port)
            .spawn()
            .context("hashes")?;
        Ok(Self { child, log: log.to_owned() })
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Whether it is at work.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end; returns its jobs.
    ///
    /// # Errors
    /// Where it fails.
    pub fn finish(mut self) -> Result<Vec<LoggedJob>> {
        let status = self.child.wait()?;
        ensure!(status.success(), "hashes: {status}");
        Ok(jobs_of(&std::fs::read_to_string(&self.log)?, '\n'))
    }
}

impl Drop for PeriodicTask {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Steps as the program takes them.
pub fn step_words(steps: &[(f64, u64)]) -> Vec<String> {
    steps.iter().map(|(seconds, bytes)| format!("{seconds}:{bytes}")).collect()
}

/// The jobs of a log.
pub fn jobs_of(log: &str, separator: char) -> Vec<LoggedJob> {
    let job = |line: &str| {
        let mut numbers = line.split_whitespace().map_while(|word| word.parse().ok());
        let (number, bytes) = (numbers.next()?, numbers.next()?);
        Some(LoggedJob { number, bytes, response_us: numbers.next()?, cpu_us: numbers.next()? })
    };
    log.split(separator).filter_map(job).collect()
}
