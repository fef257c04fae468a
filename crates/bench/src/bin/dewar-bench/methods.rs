//! The ways to a file that are compared.

use crate::measure::{Figures, Subject};
use anyhow::{Context, Result, ensure};
use dewar_bench::wait_for_migration;
use dewar_guest_qemu::Qmp;
use dewar_testkit::Lab;
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

const SAVED_WITHIN: Duration = Duration::from_secs(180);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Dewar,
    DewarZstd,
    DewarLz4,
    StopAndSave,
    MigrateToFile,
    BackgroundSnapshot,
    ExecZstd,
    MappedRamMultifd,
}

impl Method {
    pub const ALL: [Self; 8] = [
        Self::Dewar,
        Self::DewarZstd,
        Self::DewarLz4,
        Self::StopAndSave,
        Self::MigrateToFile,
        Self::BackgroundSnapshot,
        Self::ExecZstd,
        Self::MappedRamMultifd,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Dewar => "dewar",
            Self::DewarZstd => "dewar --codec zstd",
            Self::DewarLz4 => "dewar --codec lz4",
            Self::StopAndSave => "qemu stop-and-save",
            Self::MigrateToFile => "qemu migrate-to-file",
            Self::BackgroundSnapshot => "qemu background-snapshot",
            Self::ExecZstd => "qemu exec:zstd -1 -T0",
            Self::MappedRamMultifd => "qemu mapped-ram+multifd",
        }
    }

    pub fn is_dewars(self) -> bool {
        matches!(self, Self::Dewar | Self::DewarZstd | Self::DewarLz4)
    }
}

/// Takes one checkpoint, and brings the guest back from it where the method is
/// compared at that.
pub fn run(method: Method, lab: &Lab, subject: &mut Subject) -> Result<Figures> {
    match method {
        Method::Dewar => dewar(lab, subject, "auto", true),
        Method::DewarZstd => dewar(lab, subject, "zstd", false),
        Method::DewarLz4 => dewar(lab, subject, "lz4", false),
        other => qemu(other, lab, subject),
    }
}

fn dewar(lab: &Lab, subject: &mut Subject, codec: &str, restore: bool) -> Result<Figures> {
    let mut stages = Value::Null;
    let mut figures = subject.time(|_| {
        let report = lab.dewar(&["checkpoint", "bench", "--full", "--tag", "t", "--codec", codec]);
        ensure!(report.code == 0, "{}", report.stderr);
        let json = report.json();
        let pause = json["pause_ms"].as_f64().unwrap_or(0.0);
        stages = json["stages"].clone();
        Ok((json["stored_bytes"].as_u64().unwrap_or(0), pause))
    })?;
    figures.stages = stages;
    if restore {
        let (first, full) = subject.time_restore(
            |_| lab.crash("bench"),
            |_| {
                let ran = lab.dewar(&["restore", "t"]);
                ensure!(ran.code == 0, "{}", ran.stderr);
                Ok(())
            },
        )?;
        figures.first_beat_ms = Some(first);
        figures.full_speed_ms = Some(full);
        subject.pid = lab.pid("bench").context("the guest runs")?;
        let complete = |guest: &Value| guest["lazy_restore"]["complete"] == true;
        while !lab.ps("bench").is_some_and(|guest| complete(&guest)) {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    Ok(figures)
}

fn qemu(method: Method, lab: &Lab, subject: &mut Subject) -> Result<Figures> {
    let file = lab.path().join("saved");
    let _ = std::fs::remove_file(&file);
    let mut figures = subject.time(|subject| {
        let qmp = subject.qmp.as_mut().context("QMP")?;
        let pause = save(method, qmp, &file)?;
        // On disk, as Dewar's is.
        File::open(&file)?.sync_all()?;
        Ok((std::fs::metadata(&file)?.len(), pause))
    })?;
    if method == Method::MigrateToFile {
        let uri = format!("exec:cat {}", file.display());
        let (first, full) = subject.time_restore(Subject::end_by_hand, |subject| {
            subject.start_incoming(&uri)?;
            let qmp = subject.qmp.as_mut().context("QMP")?;
            wait_for_migration(qmp, SAVED_WITHIN)?;
            // The command line has no -S: it starts by itself unless it was
            // stopped when it was saved.
            drop(qmp.execute("cont", json!({})));
            Ok(())
        })?;
        figures.first_beat_ms = Some(first);
        figures.full_speed_ms = Some(full);
    }
    let _ = std::fs::remove_file(&file);
    Ok(figures)
}

/// Saves the guest and lets it run; returns the pause that QEMU tells.
fn save(method: Method, qmp: &mut Qmp, file: &PathBuf) -> Result<f64> {
    let ask = |qmp: &mut Qmp, command: &str, arguments: Value| qmp.execute(command, arguments);
    ask(qmp, "migrate-set-parameters", json!({"max-bandwidth": 100u64 << 30}))?;
    let mut capabilities: Vec<&str> = Vec::new();
    let mut uri = "fd:bench".to_owned();
    match method {
        Method::StopAndSave => drop(ask(qmp, "stop", json!({}))?),
        Method::BackgroundSnapshot => capabilities.push("background-snapshot"),
        Method::ExecZstd => uri = format!("exec:zstd -q -1 -T0 > {}", file.display()),
        Method::MappedRamMultifd => {
            capabilities.extend(["mapped-ram", "multifd"]);
            uri = format!("file:{}", file.display());
        }
        _ => {}
    }
    set(qmp, &capabilities, true).context("this QEMU does not have it")?;
    if uri == "fd:bench" {
        let out = File::options().write(true).create(true).truncate(true).open(file)?;
        qmp.execute_with_fd("getfd", json!({"fdname": "bench"}), out.as_fd())?;
    }
    let began = ask(qmp, "migrate", json!({"uri": uri}));
    let waited =
        began.map_err(anyhow::Error::from).and_then(|_| wait_for_migration(qmp, SAVED_WITHIN));
    // A snapshot taken in the background lets the guest run by itself.
    let running = ask(qmp, "query-status", json!({}))?["running"] == true;
    if !running {
        ask(qmp, "cont", json!({}))?;
    }
    set(qmp, &capabilities, false)?;
    waited?;
    let report = ask(qmp, "query-migrate", json!({}))?;
    Ok(report["downtime"].as_f64().unwrap_or(0.0))
}

fn set(qmp: &mut Qmp, capabilities: &[&str], state: bool) -> Result<()> {
    if capabilities.is_empty() {
        return Ok(());
    }
    let list: Vec<Value> =
        capabilities.iter().map(|name| json!({"capability": name, "state": state})).collect();
    qmp.execute("migrate-set-capabilities", json!({"capabilities": list}))?;
    Ok(())
}
