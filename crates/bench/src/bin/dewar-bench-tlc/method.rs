//! The ways that are compared.

use crate::Plan;
use crate::table::Figures;
use anyhow::{Context, Result, ensure};
use dewar_bench::{connect_soon, start_qemu, wait_for_migration};
use dewar_guest_qemu::Qmp;
use dewar_testkit::{Console, GuestSpec, Heartbeat, Lab, TestGuest, kill, wait_while_alive};
use rustix::fs::{Advice, fadvise};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

const SECTION_WITHIN: Duration = Duration::from_secs(1200);
const SAVED_WITHIN: Duration = Duration::from_secs(600);

/// A guest, and a way to save it.
pub trait Method {
    fn wait_for_section(&mut self, name: &str) -> Result<()>;

    /// Saves the guest, ends it, and brings it back.
    fn checkpoint_and_return(&mut self) -> Result<Figures>;
}

fn spec(plan: &Plan) -> GuestSpec {
    GuestSpec {
        memory_mib: plan.memory_mib,
        disks: Vec::new(),
        beat_ms: 1,
        ..GuestSpec::measured()
    }
}

fn begins(section: &str) -> String {
    format!("Begin of {section} section")
}

/// Times `work`: its end, and the longest time without a heartbeat.
fn watched(heart: &Heartbeat, work: impl FnOnce() -> Result<()>) -> Result<(f64, f64)> {
    let from = Instant::now();
    work()?;
    let total = from.elapsed().as_secs_f64();
    let gap = heart.between(from, Instant::now()).longest_gap;
    Ok((total, gap.as_secs_f64() * 1e3))
}

/// Drops the files under a folder from the page cache.
fn forget(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            forget(&path)?;
        } else {
            let file = File::open(&path)?;
            file.sync_all()?;
            fadvise(&file, 0, None, Advice::DontNeed)?;
        }
    }
    Ok(())
}

pub struct Dewar<'l> {
    lab: &'l Lab,
    guest: TestGuest,
    heart: Option<Heartbeat>,
    store: PathBuf,
    arguments: Vec<String>,
}

impl<'l> Dewar<'l> {
    pub fn boot(lab: &'l Lab, plan: &Plan, disk: &Path, more: &[&str]) -> Result<Self> {
        let guest = lab.run("hpcc", &spec(plan))?;
        let heart = Some(guest.heartbeat()?);
        let store = disk.join("store");
        let arguments = [&["--full"], more].concat().iter().map(|it| (*it).to_owned()).collect();
        Ok(Self { lab, guest, heart, store, arguments })
    }

    /// Brings the guest back from `id`; returns the time that it took.
    fn restore(&self, id: &str, how: &[&str]) -> Result<f64> {
        self.lab.crash("hpcc");
        forget(&self.store)?;
        let store = self.store.display().to_string();
        let from = Instant::now();
        let ran = self.lab.dewar(&[&["restore", id, "--store", &store], how].concat());
        ensure!(ran.code == 0, "{}", ran.stderr);
        Ok(from.elapsed().as_secs_f64())
    }
}

impl Method for Dewar<'_> {
    fn wait_for_section(&mut self, name: &str) -> Result<()> {
        self.guest.console.wait_for(&begins(name), SECTION_WITHIN)
    }

    fn checkpoint_and_return(&mut self) -> Result<Figures> {
        let store = self.store.display().to_string();
        let mut line = vec!["checkpoint", "hpcc", "--store", &store];
        line.extend(self.arguments.iter().map(String::as_str));
        let mut report = Value::Null;
        let heart = self.heart.take().context("a heartbeat")?;
        let (total_s, longest_pause_ms) = watched(&heart, || {
            let ran = self.lab.dewar(&line);
            ensure!(ran.code == 0, "{}", ran.stderr);
            report = ran.json();
            Ok(())
        })?;
        drop(heart);
        let id = report["checkpoint"].as_str().context("its id")?.to_owned();
        let restart_s = self.restore(&id, &["--eager", "--paused"])?;
        let lazy_restart_s = Some(self.restore(&id, &[])?);
        let folder = self.guest.folder.clone();
        self.guest.console = Console::connect(&folder.join("console"))?;
        self.heart = Some(self.guest.heartbeat()?);
        self.lab.wait_for_memory("hpcc");
        let at = |name: &str| {
            let stages = report["stages"].as_array()?;
            stages.iter().find(|stage| stage["step"] == name)?["at_ms"].as_f64()
        };
        let end = report["total_ms"].as_f64();
        let behind = end.zip(at("resumed")).map(|(end, from)| (end - from) / 1e3);
        Ok(Figures {
            total_s,
            longest_pause_ms,
            own_pause_ms: report["pause_ms"].as_f64(),
            restart_s,
            lazy_restart_s,
            stored_bytes: report["stored_bytes"].as_u64().unwrap_or(0),
            captured: report["captured"].clone(),
            in_dirty_store: report["pages"]["dirty_store"].as_u64(),
            behind_s: behind,
            epochs: report["epochs"].clone(),
        })
    }
}

pub struct Qemu {
    line: Vec<String>,
    guest: TestGuest,
    child: Child,
    file: PathBuf,
}

impl Qemu {
    pub fn boot(lab: &Lab, plan: &Plan, disk: &Path) -> Result<Self> {
        let folder = lab.guest_folder("hpcc")?;
        let mut line = spec(plan).command(&folder)?;
        let socket = folder.join("qmp");
        line.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", socket.display())]);
        let (child, mut console) = start_qemu(&line, &folder)?;
        console.wait_ready(Duration::from_secs(120))?;
        let guest = TestGuest { name: "hpcc".to_owned(), folder, console };
        Ok(Self { line, guest, child, file: disk.join("saved") })
    }

    fn qmp(&self) -> Result<Qmp> {
        connect_soon(&self.guest.folder.join("qmp"))
    }
}

impl Method for Qemu {
    fn wait_for_section(&mut self, name: &str) -> Result<()> {
        self.guest.console.wait_for(&begins(name), SECTION_WITHIN)
    }

    fn checkpoint_and_return(&mut self) -> Result<Figures> {
        let heart = self.guest.heartbeat()?;
        let mut qmp = self.qmp()?;
        let (total_s, longest_pause_ms) = watched(&heart, || {
            qmp.execute("migrate-set-parameters", json!({"max-bandwidth": 100u64 << 30}))?;
            qmp.execute("stop", json!({}))?;
            let out = File::create(&self.file)?;
            qmp.execute_with_fd("getfd", json!({"fdname": "save"}), out.as_fd())?;
            qmp.execute("migrate", json!({"uri": "fd:save"}))?;
            wait_for_migration(&mut qmp, SAVED_WITHIN)?;
            // Stopped until it is safe, as the paper's hypervisor does it.
            File::open(&self.file)?.sync_all()?;
            qmp.execute("cont", json!({}))?;
            Ok(())
        })?;
        drop((heart, qmp));
        let stored_bytes = std::fs::metadata(&self.file)?.len();
        let pid = self.child.id() as i32;
        kill(pid, Signal::KILL);
        self.child.wait()?;
        wait_while_alive(pid);
        forget(self.file.parent().context("its folder")?)?;
        let from = Instant::now();
        let mut line = self.line.clone();
        line.extend(["-incoming".to_owned(), format!("exec:cat {}", self.file.display())]);
        let _ = std::fs::remove_file(self.guest.folder.join("qmp"));
        let (child, console) = start_qemu(&line, &self.guest.folder)?;
        self.child = child;
        self.guest.console = console;
        let mut qmp = self.qmp()?;
        wait_for_migration(&mut qmp, SAVED_WITHIN)?;
        // It was stopped when it was saved.
        qmp.execute("cont", json!({}))?;
        Ok(Figures {
            total_s,
            longest_pause_ms,
            restart_s: from.elapsed().as_secs_f64(),
            stored_bytes,
            ..Figures::default()
        })
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
