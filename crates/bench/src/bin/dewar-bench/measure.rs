//! One guest, and what can be seen of it from outside.

use anyhow::{Context, Result};
use dewar_bench::{Witness, connect_soon, start_qemu};
use dewar_guest_qemu::Qmp;
use dewar_testkit::{Beats, Console, GuestSpec, Heartbeat, Lab, TestGuest, kill, wait_while_alive};
use rustix::process::Signal;
use serde_json::Value;
use std::process::Child;
use std::time::{Duration, Instant};

/// How long it is looked what a guest does without a checkpoint.
const USUAL: Duration = Duration::from_secs(3);
/// How long a guest may take to get over a checkpoint.
const SETTLES: Duration = Duration::from_secs(1);
/// How long a restored guest may take to its first heartbeat.
const REVIVED_WITHIN: Duration = Duration::from_secs(120);

/// What one checkpoint, and perhaps the restore after it, cost.
#[derive(Debug, Clone, Default)]
pub struct Figures {
    /// Longest heartbeat gap, less that of as long a time without a checkpoint.
    pub pause_ms: f64,
    /// That gap, and how long after the command's start it began.
    pub gap_ms: f64,
    pub gap_at_ms: f64,
    /// How long a CPU was away for all programs in that gap.
    pub away_ms: Option<f64>,
    /// The longest gap without a checkpoint.
    pub quiet_ms: f64,
    /// What the tool itself says that the pause was.
    pub own_pause_ms: f64,
    pub total_s: f64,
    pub writes_lost: f64,
    pub stored_bytes: f64,
    pub cpu_s: f64,
    /// Dewar's steps.
    pub stages: Value,
    pub first_beat_ms: Option<f64>,
    pub full_speed_ms: Option<f64>,
}

/// A guest that is measured.
pub struct Subject {
    pub guest: TestGuest,
    pub pid: i32,
    pub qmp: Option<Qmp>,
    pub line: Vec<String>,
    heart: Option<Heartbeat>,
    child: Option<Child>,
    witness: Option<Witness>,
    rate: u64,
}

impl Subject {
    pub fn by_dewar(lab: &Lab, spec: &GuestSpec) -> Result<Self> {
        let guest = lab.run("bench", spec)?;
        let pid = lab.pid("bench").context("the guest runs")?;
        Ok(Self::new(guest, pid))
    }

    fn new(guest: TestGuest, pid: i32) -> Self {
        let (heart, witness) = (None, None);
        Self { guest, pid, qmp: None, line: Vec::new(), heart, child: None, witness, rate: 0 }
    }

    /// The same command line without Dewar, and a QMP socket.
    pub fn by_hand(lab: &Lab, spec: &GuestSpec) -> Result<Self> {
        let folder = lab.guest_folder("bench")?;
        let mut line = spec.command(&folder)?;
        line.extend([
            "-qmp".to_owned(),
            format!("unix:{}/qmp,server=on,wait=off", folder.display()),
        ]);
        let (child, console) = start_qemu(&line, &folder)?;
        Self::booted(line, folder, child, console)
    }

    fn booted(
        line: Vec<String>,
        folder: std::path::PathBuf,
        child: Child,
        mut console: Console,
    ) -> Result<Self> {
        console.wait_ready(Duration::from_secs(120))?;
        let qmp = connect_soon(&folder.join("qmp"))?;
        let pid = child.id() as i32;
        let guest = TestGuest { name: "bench".to_owned(), folder, console };
        let mut subject = Self::new(guest, pid);
        (subject.qmp, subject.line, subject.child) = (Some(qmp), line, Some(child));
        Ok(subject)
    }

    pub fn load(&mut self, rate: u64) -> Result<()> {
        self.rate = rate;
        if rate > 0 {
            self.guest.console.ask(&format!("words {rate}"))?;
            std::thread::sleep(Duration::from_secs(1));
        }
        self.heart = Some(self.guest.heartbeat()?);
        self.witness = Witness::watch();
        Ok(())
    }

    /// Steps, or words, a second.
    pub fn speed(&mut self, window: Duration) -> Result<f64> {
        let (from, start) = (Instant::now(), self.guest.console.ask_number("count")?);
        std::thread::sleep(window);
        let end = self.guest.console.ask_number("count")?;
        Ok((end - start) as f64 / from.elapsed().as_secs_f64())
    }

    /// Times `work`: what the guest felt of it and what CPU it took. `work`
    /// returns the bytes stored and the pause that the tool tells.
    pub fn time(&mut self, work: impl FnOnce(&mut Self) -> Result<(u64, f64)>) -> Result<Figures> {
        let (usual_from, before) = (Instant::now(), cpu_of(self.pid));
        let usual = self.speed(USUAL)?;
        let usual_cpu = (cpu_of(self.pid) - before) / usual_from.elapsed().as_secs_f64();

        let (guest_cpu, children_cpu) = (cpu_of(self.pid), cpu_of_children());
        let count = self.guest.console.ask_number("count")?;
        let from = Instant::now();
        let (stored_bytes, own_pause_ms) = work(self)?;
        let total = from.elapsed();
        let done = self.guest.console.ask_number("count")?;
        let window = from.elapsed().as_secs_f64();
        let to = Instant::now();
        let cpu = (cpu_of(self.pid) - guest_cpu - usual_cpu * window).max(0.0)
            + (cpu_of_children() - children_cpu);
        let heart = self.heart.as_ref().context("a heartbeat")?;
        let Beats { longest_gap: gap, gap_from, .. } = heart.between(from, to);
        let away = self.witness.as_ref().map(|it| it.longest(gap_from, gap_from + gap));
        std::thread::sleep(SETTLES);
        let quiet_from = Instant::now();
        std::thread::sleep(total);
        let Beats { count: beats, longest_gap: quiet, .. } =
            heart.between(quiet_from, Instant::now());
        anyhow::ensure!(beats > 0, "no heartbeat after the checkpoint");
        Ok(Figures {
            pause_ms: millis(gap.saturating_sub(quiet)),
            gap_ms: millis(gap),
            gap_at_ms: millis(gap_from - from),
            away_ms: away.map(millis),
            quiet_ms: millis(quiet),
            own_pause_ms,
            total_s: total.as_secs_f64(),
            writes_lost: (usual * window - (done - count) as f64).max(0.0),
            stored_bytes: stored_bytes as f64,
            cpu_s: cpu,
            ..Figures::default()
        })
    }

    /// Ends the guest and lets `restore` bring it back; times its first beat,
    /// and when it writes as fast as before.
    pub fn time_restore(
        &mut self,
        end: impl FnOnce(&mut Self),
        restore: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<(f64, f64)> {
        let usual = self.rate as f64;
        self.heart = None;
        end(self);
        let _ = std::fs::remove_file(self.guest.folder.join("heartbeat"));
        let from = Instant::now();
        let folder = self.guest.folder.clone();
        // The port is there as soon as QEMU is; the beat comes with the guest.
        let listening = std::thread::spawn(move || -> Result<(Heartbeat, f64)> {
            let heart = loop {
                match Heartbeat::listen(&folder.join("heartbeat")) {
                    Ok(heart) => break heart,
                    Err(error) if from.elapsed() > REVIVED_WITHIN => return Err(error),
                    Err(_) => std::thread::sleep(Duration::from_micros(500)),
                }
            };
            while from.elapsed() < REVIVED_WITHIN {
                if let Some(beat) = heart.first_after(from) {
                    return Ok((heart, (beat - from).as_secs_f64() * 1e3));
                }
                std::thread::sleep(Duration::from_micros(500));
            }
            anyhow::bail!("no heartbeat after a restore")
        });
        restore(self)?;
        let (heart, first) =
            listening.join().map_err(|_| anyhow::anyhow!("the listener died"))??;
        self.heart = Some(heart);
        self.guest.console = Console::connect(&self.guest.folder.join("console"))?;
        while usual > 0.0 && self.speed(Duration::from_millis(200))? < 0.9 * usual {
            anyhow::ensure!(from.elapsed() < REVIVED_WITHIN, "it does not come to its old speed");
        }
        Ok((first, from.elapsed().as_secs_f64() * 1e3))
    }

    /// Ends a QEMU that was started by hand.
    pub fn end_by_hand(&mut self) {
        kill(self.pid, Signal::KILL);
        if let Some(child) = &mut self.child {
            let _ = child.wait();
        }
        wait_while_alive(self.pid);
        self.qmp = None;
    }

    /// Starts the same command line again, to be migrated into.
    pub fn start_incoming(&mut self, uri: &str) -> Result<()> {
        let mut line = self.line.clone();
        line.extend(["-incoming".to_owned(), uri.to_owned()]);
        let _ = std::fs::remove_file(self.guest.folder.join("qmp"));
        let (child, console) = start_qemu(&line, &self.guest.folder)?;
        self.pid = child.id() as i32;
        self.child = Some(child);
        self.guest.console = console;
        self.qmp = Some(connect_soon(&self.guest.folder.join("qmp"))?);
        Ok(())
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Seconds of CPU that fields of `/proc/PID/stat` tell.
fn ticks(path: &str, fields: &[usize]) -> f64 {
    let stat = std::fs::read_to_string(path).unwrap_or_default();
    let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let words: Vec<&str> = rest.split(' ').collect();
    let sum: u64 =
        fields.iter().filter_map(|field| words.get(field - 3)?.parse::<u64>().ok()).sum();
    sum as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// Of a process, and of its children that it waited for: `exec:zstd`'s.
fn cpu_of(pid: i32) -> f64 {
    ticks(&format!("/proc/{pid}/stat"), &[14, 15, 16, 17])
}

/// Of children that were waited for, with theirs.
fn cpu_of_children() -> f64 {
    ticks("/proc/self/stat", &[16, 17])
}
