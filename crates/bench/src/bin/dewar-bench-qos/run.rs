//! One run: the task, the hogs, the way; what is seen from outside.

use crate::load::{Cost, Load, PERIOD_MS, RATE};
use crate::outside::Outside;
use crate::report::Row;
use crate::way::Way;
use anyhow::{Context, Result, ensure};
use dewar_bench::median;
use dewar_guest_qemu::cmdline::PORT_FILE;
use dewar_kernel::{Reservation, Scheduling, Task, threads_of};
use dewar_registry::Registry;
use dewar_testkit::{
    GuestSpec, Hogs, Lab, LoggedJob, PeriodicTask, TestGuest, jobs_of, step_words,
};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// How often the reservation is looked at.
const LOOK: Duration = Duration::from_millis(10);
/// How often a guest is asked whether its program has ended, once it should have.
const ASK: Duration = Duration::from_millis(250);
/// What a fixed reservation is above what it is for.
const MARGIN: f64 = 1.05;
/// The time between two beats of the guest's serial port: its hashes are measured.
const QUIET_MS: u64 = 1000;
/// Steps that are told a guest at once.
const WORDS: usize = 100;
/// For how long it is measured what a hash takes, in seconds, and the bytes to begin with.
const TRY: (f64, u64) = (2.0, 200_000);
/// The part of a period that a hash shall take then.
const TRIED: f64 = 0.5;
/// The most that `dewar qos` may give.
const MAX: f64 = 0.88;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubjectKind {
    Process,
    Guest,
}

impl SubjectKind {
    pub const ALL: [Self; 2] = [Self::Process, Self::Guest];

    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Guest => "guest",
        }
    }
}

/// A lab with the task's guest, if it has one.
pub struct Bench<'l> {
    lab: &'l Lab,
    kind: SubjectKind,
    guest: Option<TestGuest>,
    cost: Cost,
    runs: u32,
}

/// A task at work.
enum Running {
    Process(PeriodicTask),
    /// Its number and its log in the guest, and when to look next whether it has ended.
    Guest {
        pid: String,
        log: String,
        look: Instant,
    },
}

impl<'l> Bench<'l> {
    pub fn new(lab: &'l Lab, kind: SubjectKind) -> Result<Self> {
        let (disks, beat_ms) = (vec![], QUIET_MS);
        let spec =
            GuestSpec { memory_mib: 192, disks, beat_ms, qos: true, ..GuestSpec::measured() };
        let guest = match kind {
            SubjectKind::Process => None,
            SubjectKind::Guest => Some(lab.run("g", &spec)?),
        };
        let mut bench = Self { lab, kind, guest, cost: Cost::default(), runs: 0 };
        let roughly = bench.measure_cost(TRY.1)?;
        bench.cost = bench.measure_cost((TRIED * PERIOD_MS / roughly.ms_per_mb * 1e6) as u64)?;
        Ok(bench)
    }

    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// What jobs of so many bytes take while nothing else runs.
    fn measure_cost(&mut self, bytes: u64) -> Result<Cost> {
        let outside = self.outside()?;
        let mut running = self.start(&[(TRY.0, bytes)])?;
        while self.is_running(&mut running)? {
            std::thread::sleep(LOOK);
        }
        let mut jobs = self.finish(running)?;
        let ms =
            |jobs: &[LoggedJob]| median(jobs.iter().map(|job| job.cpu_us as f64 / 1e3).collect());
        let hash = ms(&jobs);
        outside.map_or(Ok(()), |outside| outside.set_cpu_times(&mut jobs))?;
        Ok(Cost { ms_per_mb: hash / (bytes as f64 / 1e6), ms_beside: ms(&jobs) - hash })
    }

    pub fn measure(&mut self, load: &Load, way: &Way, hogs: &Hogs) -> Result<Row> {
        // A thread that was promised CPU time keeps it for a period.
        std::thread::sleep(Duration::from_millis(100));
        let outside = if *way == Way::Ahead { self.outside()? } else { None };
        let mut running = self.start(&load.steps)?;
        let began = Instant::now();
        let mut threads = vec![self.thread(&running)?];
        if *way == Way::Ahead {
            // A guest's other threads must not keep its vCPU waiting either.
            threads = threads_of(threads[0].process);
        }
        let before: Vec<Scheduling> =
            threads.iter().filter_map(|task| task.scheduling().ok()).collect();
        let mut controller = self.apply(way, load, &threads, &running)?;
        let (hogs_before, from) = (ran(hogs), Instant::now());
        let had = || ((ran(hogs) - hogs_before).as_secs_f64(), from.elapsed().as_secs_f64());
        // Of the time that the load lasts: it may be late, and be at work for longer.
        let mut hogs_had = None;
        let mut shares = Vec::new();
        while self.is_running(&mut running)? {
            let share = threads.iter().map(|task| share_of(*task)).sum::<f64>();
            let elapsed = began.elapsed().as_secs_f64();
            shares.push((elapsed, share));
            if hogs_had.is_none() && elapsed >= load.seconds() {
                hogs_had = Some(had());
            }
            std::thread::sleep(LOOK);
        }
        let (hogs_had, elapsed) = hogs_had.unwrap_or_else(had);
        if let Some(controller) = &mut controller {
            if self.kind == SubjectKind::Guest {
                self.lab.dewar(&["qos", "g", "--release"]).done();
            }
            let ended = controller.wait()?;
            ensure!(ended.success(), "dewar qos {way:?}: {ended}");
        }
        for (task, how) in threads.iter().zip(before) {
            // A thread may have ended.
            ensure!(task.scheduling().is_err() || task.schedule(how).is_ok(), "{task:?}: {how:?}");
        }
        let mut jobs = self.finish(running)?;
        outside.map_or(Ok(()), |outside| outside.set_cpu_times(&mut jobs))?;
        let count = (load.seconds() * RATE).round() as usize;
        ensure!(jobs.len() == count, "{} of {count} jobs were logged", jobs.len());
        Ok(Row::new(self.kind, load, way, jobs, shares, hogs_had, elapsed))
    }

    fn start(&mut self, steps: &[(f64, u64)]) -> Result<Running> {
        self.runs += 1;
        let Some(guest) = &mut self.guest else {
            let port = self.lab.root().join("qos/p.sock");
            let log = self.lab.path().join(format!("log{}", self.runs));
            return Ok(Running::Process(PeriodicTask::start(RATE, steps, &port, &log)?));
        };
        let log = format!("/log{}", self.runs);
        let seconds: f64 = steps.iter().map(|(seconds, _)| seconds).sum();
        let file = format!("/steps{}", self.runs);
        for words in step_words(steps).chunks(WORDS) {
            guest.console.ask(&format!("append {file} {}", words.join(" ")))?;
        }
        let pid = guest.console.ask(&format!("spawn hashes {RATE} {log} @{file}"))?;
        let look = Instant::now() + Duration::from_secs_f64(seconds) + ASK;
        Ok(Running::Guest { pid, log, look })
    }

    /// Whether it is; one that is late goes on for longer than its load.
    fn is_running(&mut self, running: &mut Running) -> Result<bool> {
        match running {
            Running::Process(task) => Ok(task.is_running()),
            Running::Guest { look, .. } if Instant::now() < *look => Ok(true),
            Running::Guest { pid, look, .. } => {
                *look = Instant::now() + ASK;
                let guest = self.guest.as_mut().context("a guest")?;
                // Nobody waits for it there: it becomes a zombie.
                Ok(!guest.console.ask(&format!("show /proc/{pid}/stat"))?.contains(") Z "))
            }
        }
    }

    fn finish(&mut self, running: Running) -> Result<Vec<LoggedJob>> {
        match running {
            Running::Process(task) => task.finish(),
            Running::Guest { log, .. } => {
                let guest = self.guest.as_mut().context("a guest")?;
                Ok(jobs_of(&guest.console.ask(&format!("show {log}"))?, ';'))
            }
        }
    }

    /// Looks at what a guest's jobs take of its vCPU.
    fn outside(&self) -> Result<Option<Outside>> {
        if self.guest.is_none() {
            return Ok(None);
        }
        let port = Registry::new(&self.lab.root()).guest("g")?.file(PORT_FILE);
        Outside::look(&port, self.vcpu()?).map(Some)
    }

    /// The thread that does the work.
    fn thread(&self, running: &Running) -> Result<Task> {
        match running {
            Running::Process(task) => Ok(Task { process: task.pid(), thread: task.pid() }),
            Running::Guest { .. } => self.vcpu(),
        }
    }

    /// The guest's vCPU: of QEMU's threads the busiest.
    fn vcpu(&self) -> Result<Task> {
        let pid = self.lab.pid("g").context("the guest")?;
        threads_of(pid).into_iter().max_by_key(|task| task.ran()).context("its vCPU")
    }

    fn apply(
        &self,
        way: &Way,
        load: &Load,
        threads: &[Task],
        running: &Running,
    ) -> Result<Option<Child>> {
        let fixed = |ms: f64| {
            let share = (ms * MARGIN / PERIOD_MS).min(0.9);
            let period = Duration::from_secs_f64(PERIOD_MS / 1e3);
            let runtime = period.mul_f64(share);
            threads
                .iter()
                .try_for_each(|task| task.reserve(Reservation { runtime, period, reclaim: false }))
        };
        match way {
            Way::Default => {}
            Way::Nice => {
                threads.iter().try_for_each(|task| task.schedule(Scheduling::ordinary(-20)))?;
            }
            Way::Mean => fixed(load.mean_ms)?,
            Way::Peak => fixed(load.peak_ms)?,
            Way::Ahead => {
                threads.iter().try_for_each(|task| task.schedule(Scheduling::ahead(1)))?
            }
            Way::Dewar(_, words) => {
                let max = format!("{:.0}%", MAX * 100.0);
                let rate = format!("{RATE}/s");
                let mut line = vec!["qos", if self.guest.is_some() { "g" } else { "p" }];
                line.extend(["--target", &rate, "--max", &max]);
                line.extend(words.iter().map(String::as_str));
                let pid = match running {
                    Running::Process(task) => Some(task.pid().to_string()),
                    Running::Guest { .. } => None,
                };
                line.extend(pid.iter().flat_map(|pid| ["--pid", pid.as_str()]));
                let mut command = self.lab.command(&line);
                return Ok(Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?));
            }
        }
        Ok(None)
    }
}

/// What a thread is promised now. One that is let run on counts with the most that it
/// may get.
fn share_of(task: Task) -> f64 {
    match task.scheduling() {
        Ok(how) => match how.reservation {
            Some(it) => it.runtime.div_duration_f64(it.period),
            // SCHED_FIFO.
            None if how.policy == 1 => MAX,
            None => 0.0,
        },
        Err(_) => 0.0,
    }
}

/// The CPU time that the hogs have had.
fn ran(hogs: &Hogs) -> Duration {
    let ran = |pid: i32| Task { process: pid, thread: pid }.ran().unwrap_or_default();
    hogs.pids().into_iter().map(ran).sum()
}
