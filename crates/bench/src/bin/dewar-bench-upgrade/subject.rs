//! One idle guest with all its memory in use, and the ways to change what is
//! under it.

use crate::Plan;
use anyhow::{Result, ensure};
use dewar_bench::{
    beat_into_fifo, connect_soon, listen, reserved_mib, start_qemu, wait_for_migration,
};
use dewar_testkit::{Console, GuestSpec, Heartbeat, Lab, TestGuest, wait_while_alive};
use serde_json::json;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

/// A time without anything, to compare gaps with.
const QUIET: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(300);

/// How what is under a guest is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Upgrade,
    FreezeThaw,
    FreezeThawUnchecked,
    SaveRestore,
    ShutdownBoot,
}

impl Way {
    pub const ALL: [Self; 5] = [
        Self::Upgrade,
        Self::FreezeThaw,
        Self::FreezeThawUnchecked,
        Self::SaveRestore,
        Self::ShutdownBoot,
    ];

    /// Those of a list of words.
    pub fn named(words: &str) -> Option<Vec<Self>> {
        let way = |word| {
            Some(match word {
                "upgrade" => Self::Upgrade,
                "freeze" => Self::FreezeThaw,
                "unchecked" => Self::FreezeThawUnchecked,
                "save" => Self::SaveRestore,
                "boot" => Self::ShutdownBoot,
                _ => return None,
            })
        };
        words.split(',').map(way).collect()
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Upgrade => "dewar upgrade",
            Self::FreezeThaw => "dewar freeze, thaw",
            Self::FreezeThawUnchecked => "the same without checksums",
            Self::SaveRestore => "QEMU: save to a file, restore",
            Self::ShutdownBoot => "QEMU: shut down, boot",
        }
    }

    pub fn is_dewars(self) -> bool {
        !matches!(self, Self::SaveRestore | Self::ShutdownBoot)
    }
}

pub struct Figures {
    pub gap_ms: f64,
    pub total_ms: f64,
}

pub struct Subject {
    lab: Lab,
    guest: TestGuest,
    line: Vec<String>,
    /// Of a QEMU that was started by hand.
    child: Option<Child>,
    heart: Heartbeat,
    mib: u64,
}

/// The command line of a guest whose heartbeat goes to a FIFO.
pub fn command(lab: &Lab, plan: &Plan, name: &str, mut spec: GuestSpec) -> Result<Vec<String>> {
    let folder = lab.guest_folder(name)?;
    spec.extra.extend(["-machine", "pc-q35-7.2"].map(str::to_owned));
    let mut line = spec.command(&folder)?;
    line[0].clone_from(&plan.qemus[0]);
    beat_into_fifo(&mut line, &folder)?;
    Ok(line)
}

/// Starts a guest by `dewar run`.
pub fn run(lab: &Lab, name: &str, line: &[String]) -> Result<TestGuest> {
    let words: Vec<&str> = line.iter().map(String::as_str).collect();
    let ran = lab.dewar(&[&["run", name, "--"], &words[..]].concat());
    ensure!(ran.code == 0, "dewar run: {}", ran.stderr);
    lab.reach(name)
}

impl Subject {
    pub fn start(plan: &Plan, by_dewar: bool, mib: u64) -> Result<Self> {
        let lab = Lab::new(&plan.dewar)?;
        let folder = lab.guest_folder("g")?;
        let spec = GuestSpec { memory_mib: mib, beat_ms: 1, ..GuestSpec::measured() };
        let mut line = command(&lab, plan, "g", spec)?;
        let heart = listen(&folder)?;
        let (guest, child) = if by_dewar {
            (run(&lab, "g", &line)?, None)
        } else {
            let qmp = format!("unix:{}/qmp,server=on,wait=off", folder.display());
            line.extend(["-qmp".to_owned(), qmp]);
            let (child, console) = boot(&line, &folder)?;
            (TestGuest { name: "g".to_owned(), folder, console }, Some(child))
        };
        let mut subject = Self { lab, guest, line, child, heart, mib };
        subject.fill()?;
        Ok(subject)
    }

    /// Puts all of its memory to use.
    fn fill(&mut self) -> Result<()> {
        let mib = self.mib;
        let reserved = reserved_mib(mib.div_ceil(1024)).min(mib * 3 / 4);
        self.guest.console.ask(&format!("fill {} noise", mib - reserved))?;
        Ok(())
    }

    /// Does it, and times it: the gap less that of a quiet time before.
    /// `program` is the QEMU of an upgrade.
    pub fn measure(&mut self, way: Way, program: &str) -> Result<Figures> {
        let quiet_from = Instant::now();
        std::thread::sleep(QUIET);
        let quiet = self.heart.between(quiet_from, Instant::now()).longest_gap;
        let from = Instant::now();
        match way {
            Way::Upgrade => {
                self.dewar(&["upgrade", "g", "--qemu", program])?;
                let console = self.guest.folder.join("console");
                self.guest.console = Console::connect(&console)?;
            }
            Way::FreezeThaw => {
                self.dewar(&["freeze", "g"])?;
                self.dewar(&["thaw", "g"])?;
            }
            Way::FreezeThawUnchecked => {
                self.dewar(&["freeze", "g", "--no-checksum"])?;
                self.dewar(&["thaw", "g"])?;
            }
            Way::SaveRestore => self.save_and_restore()?,
            Way::ShutdownBoot => self.shut_down_and_boot()?,
        }
        let total = from.elapsed();
        let done = Instant::now();
        while self.heart.first_after(done).is_none() {
            ensure!(done.elapsed() < PATIENCE, "no heartbeat after '{}'", way.name());
            std::thread::sleep(Duration::from_millis(1));
        }
        // What comes a little later of the change, new pages say, counts too.
        std::thread::sleep(Duration::from_millis(500));
        let gap = self.heart.between(from, Instant::now()).longest_gap;
        if way == Way::ShutdownBoot {
            self.fill()?;
        }
        Ok(Figures {
            gap_ms: gap.saturating_sub(quiet).as_secs_f64() * 1e3,
            total_ms: total.as_secs_f64() * 1e3,
        })
    }

    fn dewar(&self, words: &[&str]) -> Result<()> {
        let ran = self.lab.dewar(words);
        ensure!(ran.code == 0, "dewar {words:?}: {}", ran.stderr);
        Ok(())
    }

    /// QEMU's own way: to a file on the disk, and back.
    fn save_and_restore(&mut self) -> Result<()> {
        let file = self.guest.folder.join("saved");
        let mut qmp = connect_soon(&self.guest.folder.join("qmp"))?;
        qmp.execute("stop", json!({}))?;
        qmp.execute("migrate-set-parameters", json!({"max-bandwidth": 100_u64 << 30}))?;
        qmp.execute("migrate", json!({"uri": format!("exec:cat >{}", file.display())}))?;
        wait_for_migration(&mut qmp, PATIENCE)?;
        self.end(|| drop(qmp.execute("quit", json!({}))))?;
        let mut line = self.line.clone();
        line.extend(["-incoming".to_owned(), format!("exec:cat {}", file.display())]);
        let _ = std::fs::remove_file(self.guest.folder.join("qmp"));
        let (child, console) = start_qemu(&line, &self.guest.folder)?;
        (self.child, self.guest.console) = (Some(child), console);
        let mut qmp = connect_soon(&self.guest.folder.join("qmp"))?;
        wait_for_migration(&mut qmp, PATIENCE)?;
        qmp.execute("cont", json!({}))?;
        std::fs::remove_file(file)?;
        Ok(())
    }

    fn shut_down_and_boot(&mut self) -> Result<()> {
        // It does not answer any more.
        let console = &mut self.guest.console;
        std::thread::scope(|scope| {
            scope.spawn(|| console.ask("quit"));
        });
        self.end(|| ())?;
        let (child, console) = boot(&self.line, &self.guest.folder)?;
        (self.child, self.guest.console) = (Some(child), console);
        Ok(())
    }

    fn end(&mut self, ask: impl FnOnce()) -> Result<()> {
        ask();
        if let Some(child) = &mut self.child {
            let pid = child.id() as i32;
            child.wait()?;
            wait_while_alive(pid);
        }
        Ok(())
    }
}

fn boot(line: &[String], folder: &Path) -> Result<(Child, Console)> {
    let (child, mut console) = start_qemu(line, folder)?;
    console.wait_ready(Duration::from_secs(120))?;
    Ok((child, console))
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
