//! One run: the task, the hogs, the way; what is seen from outside.

use crate::load::{Load, PERIOD_MS, RATE};
use crate::report::Row;
use crate::way::Way;
use anyhow::{Context, Result, ensure};
use dewar_kernel::{Reservation, Scheduling, Task, threads_of};
use dewar_testkit::bench::median;
use dewar_testkit::{
    GuestSpec, Hogs, Lab, LoggedJob, PeriodicTask, TestGuest, jobs_of, step_words,
};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// How often the reservation is looked at.
const LOOK: Duration = Duration::from_millis(10);
/// What a fixed reservation is above what it is for; a guest's kernel needs some, too.
const MARGIN: f64 = 1.05;
const GUEST_MARGIN: f64 = 1.25;
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
    ms_per_mb: f64,
    runs: u32,
}

/// A task at work.
enum Running {
    Process(PeriodicTask),
    Guest { log: String, ends: Instant },
}

impl<'l> Bench<'l> {
    pub fn new(lab: &'l Lab, kind: SubjectKind) -> Result<Self> {
        let spec = GuestSpec { memory_mib: 192, disks: vec![], qos: true, ..GuestSpec::default() };
        let guest = match kind {
            SubjectKind::Process => None,
            SubjectKind::Guest => Some(lab.run("g", &spec)?),
        };
        let mut bench = Self { lab, kind, guest, ms_per_mb: f64::NAN, runs: 0 };
        let bytes = if kind == SubjectKind::Guest { 200_000 } else { 2_000_000 };
        let mut running = bench.start(&[(2.0, bytes)])?;
        while bench.is_running(&mut running) {
            std::thread::sleep(LOOK);
        }
        let jobs = bench.finish(running)?;
        let times = jobs.iter().map(|job| job.cpu_us as f64 / 1e3).collect();
        bench.ms_per_mb = median(times) / (bytes as f64 / 1e6);
        Ok(bench)
    }

    pub fn ms_per_mb(&self) -> f64 {
        self.ms_per_mb
    }

    pub fn measure(&mut self, load: &Load, way: &Way, hogs: &Hogs) -> Result<Row> {
        // Whoever was promised CPU time keeps it for a period.
        std::thread::sleep(Duration::from_millis(100));
        let mut running = self.start(&load.steps)?;
        let began = Instant::now();
        let mut threads = self.threads(&running)?;
        if *way == Way::Ahead {
            // A guest's other threads must not keep its vCPU waiting either.
            threads = threads.first().map_or_else(Vec::new, |task| threads_of(task.process));
        }
        let before: Vec<Scheduling> =
            threads.iter().filter_map(|task| task.scheduling().ok()).collect();
        let mut controller = self.apply(way, load, &threads, &running)?;
        let (hogs_before, from) = (ran(hogs), Instant::now());
        let mut shares = Vec::new();
        while self.is_running(&mut running) {
            let share = threads.iter().map(|task| share_of(*task)).sum::<f64>();
            shares.push((began.elapsed().as_secs_f64(), share));
            std::thread::sleep(LOOK);
        }
        let elapsed = from.elapsed().as_secs_f64();
        let hogs_had = (ran(hogs) - hogs_before).as_secs_f64();
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
        let jobs = self.finish(running)?;
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
        // A long line is a file for the program.
        let mut words = steps.to_vec();
        let mut line = String::new();
        for chunk in words.chunks_mut(1) {
            line += &format!(" {}", step_words(chunk)[0]);
        }
        let told = guest.console.ask(&format!("spawn hashes {RATE} {log}{line}"))?;
        ensure!(!told.is_empty(), "the guest's task did not start");
        Ok(Running::Guest { log, ends: Instant::now() + Duration::from_secs_f64(seconds + 2.0) })
    }

    fn is_running(&self, running: &mut Running) -> bool {
        match running {
            Running::Process(task) => task.is_running(),
            Running::Guest { ends, .. } => Instant::now() < *ends,
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

    /// The threads that do the work.
    fn threads(&self, running: &Running) -> Result<Vec<Task>> {
        match running {
            Running::Process(task) => Ok(vec![Task { process: task.pid(), thread: task.pid() }]),
            Running::Guest { .. } => {
                let pid = self.lab.pid("g").context("the guest")?;
                let is_vcpu = |task: &Task| {
                    let name = format!("/proc/{pid}/task/{}/comm", task.thread);
                    std::fs::read_to_string(name).is_ok_and(|name| name.starts_with("CPU "))
                };
                let tasks: Vec<Task> = threads_of(pid).into_iter().filter(is_vcpu).collect();
                if !tasks.is_empty() {
                    return Ok(tasks);
                }
                // Threads have names only where QEMU was asked for them: the vCPU is the
                // busiest.
                let busiest = threads_of(pid).into_iter().max_by_key(|task| task.ran());
                Ok(busiest.into_iter().collect())
            }
        }
    }

    fn apply(
        &self,
        way: &Way,
        load: &Load,
        threads: &[Task],
        running: &Running,
    ) -> Result<Option<Child>> {
        let margin = if self.kind == SubjectKind::Guest { GUEST_MARGIN } else { MARGIN };
        let fixed = |ms: f64| {
            let share = (ms * margin / PERIOD_MS).min(0.9);
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
