//! QEMU without Dewar, to be compared with.

use anyhow::{Result, bail};
use dewar_guest_qemu::Qmp;
use dewar_testkit::Console;
use serde_json::json;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Starts a command line whose serial port is `console` in `folder`.
///
/// # Errors
/// Where it does not start.
pub fn start_qemu(line: &[String], folder: &Path) -> Result<(Child, Console)> {
    let _ = std::fs::remove_file(folder.join("console"));
    let child = Command::new(&line[0])
        .args(&line[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    Ok((child, Console::connect(&folder.join("console"))?))
}

/// Connects to a QEMU that was just started.
///
/// # Errors
/// Where it does not answer within 5 s.
pub fn connect_soon(socket: &Path) -> Result<Qmp> {
    let began = Instant::now();
    loop {
        match Qmp::connect(socket) {
            Err(_) if began.elapsed() < Duration::from_secs(5) => {
                std::thread::sleep(Duration::from_millis(2));
            }
            other => return Ok(other?),
        }
    }
}

/// Waits for the end of a migration.
///
/// # Errors
/// Where it fails, or does not end in time: then it is cancelled, and QEMU does
/// nothing any more.
pub fn wait_for_migration(qmp: &mut Qmp, within: Duration) -> Result<()> {
    let deadline = Instant::now() + within;
    loop {
        let report = qmp.execute("query-migrate", json!({}))?;
        match report["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => bail!("QEMU's migration failed: {report}"),
            _ if Instant::now() > deadline => {
                qmp.execute("migrate_cancel", json!({}))?;
                while qmp.execute("query-migrate", json!({}))?["status"] != "cancelled" {
                    std::thread::sleep(Duration::from_millis(10));
                }
                bail!("QEMU's migration does not end within {within:?}");
            }
            _ => std::thread::sleep(Duration::from_micros(500)),
        }
    }
}
