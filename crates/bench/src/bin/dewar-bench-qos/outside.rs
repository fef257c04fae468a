//! What each of a guest's jobs takes of its vCPU's thread, looked at from outside.
//!
//! The guest's clock knows what a hash took. The vCPU works for the guest's kernel, too: its
//! timers, the beat that is written, the way to sleep and back. A reservation is the thread's
//! and must do for all of it. So the thread's run time is read at the end of each job,
//! which the guest tells at the port that `dewar qos` listens to, once the thread waits: only
//! then is it exact. A job took what was run since the one before was over.

use anyhow::{Context, Result};
use dewar_beat::Line;
use dewar_kernel::Task;
use dewar_testkit::{LoggedJob, spawn_first};
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

/// The time between two looks at whether the thread waits, and how many of them.
const LOOK: Duration = Duration::from_micros(200);
const LOOKS: u32 = 20;

/// Looks on until it is told to end.
pub struct Outside {
    port: UnixStream,
    /// The thread's run time at the end of each job.
    thread: JoinHandle<HashMap<u64, Duration>>,
}

impl Outside {
    /// Begins, before the jobs do.
    pub fn look(port: &Path, vcpu: Task) -> Result<Self> {
        let port = UnixStream::connect(port).with_context(|| format!("{}", port.display()))?;
        let lines = BufReader::new(port.try_clone()?).lines();
        let thread = spawn_first(move || {
            let mut ran = HashMap::new();
            for line in lines.map_while(Result::ok) {
                if let Some(Line::Job { number, .. }) = Line::parse(line.as_bytes()) {
                    ran.extend(ran_when_it_waits(vcpu).map(|ran| (number, ran)));
                }
            }
            ran
        });
        Ok(Self { port, thread })
    }

    /// Ends; has each job but the first take what its thread took.
    pub fn set_cpu_times(self, jobs: &mut [LoggedJob]) -> Result<()> {
        self.port.shutdown(Shutdown::Both)?;
        let ran = self.thread.join().ok().context("the thread that looks on")?;
        for job in jobs.iter_mut().filter(|job| job.number > 0) {
            let at = |number: u64| {
                ran.get(&number).with_context(|| format!("job {number} was not seen"))
            };
            let took = at(job.number)?.saturating_sub(*at(job.number - 1)?);
            job.cpu_us = took.as_micros() as u64;
        }
        Ok(())
    }
}

fn ran_when_it_waits(vcpu: Task) -> Option<Duration> {
    for _ in 0..LOOKS {
        std::thread::sleep(LOOK);
        if !vcpu.is_runnable() {
            break;
        }
    }
    vcpu.ran()
}
