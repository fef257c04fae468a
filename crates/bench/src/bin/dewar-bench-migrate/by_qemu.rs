//! By stock QEMU, through a proxy that is the link for all its connections.

use crate::subject::{Figures, Load, command, fill, load, time};
use anyhow::{Context, Result};
use dewar_bench::{connect_soon, listen, start_qemu, wait_for_migration};
use dewar_guest_qemu::Qmp;
use dewar_testkit::{Console, Heartbeat, Lab, Lane, LinkSpeed, carry, free_port};
use serde_json::json;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(120);

/// One of QEMU's ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Plain,
    Xbzrle,
    Multifd,
    MultifdZstd,
    PostCopy,
}

impl Method {
    pub const ALL: [Self; 5] =
        [Self::Plain, Self::Xbzrle, Self::Multifd, Self::MultifdZstd, Self::PostCopy];

    pub fn word(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Xbzrle => "xbzrle",
            Self::Multifd => "multifd",
            Self::MultifdZstd => "multifd-zstd",
            Self::PostCopy => "postcopy",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "qemu pre-copy",
            Self::Xbzrle => "qemu xbzrle",
            Self::Multifd => "qemu multifd",
            Self::MultifdZstd => "qemu multifd + zstd",
            Self::PostCopy => "qemu post-copy",
        }
    }

    /// Settings of both sides; those of the way before are taken back.
    fn set(self, qmp: &mut Qmp) -> Result<()> {
        let multifd = matches!(self, Self::Multifd | Self::MultifdZstd);
        let list = json!([
            {"capability": "xbzrle", "state": self == Self::Xbzrle},
            {"capability": "multifd", "state": multifd},
            {"capability": "postcopy-ram", "state": self == Self::PostCopy},
        ]);
        qmp.execute("migrate-set-capabilities", json!({"capabilities": list}))?;
        let compression = if self == Self::MultifdZstd { "zstd" } else { "none" };
        let parameters = json!({
            "max-bandwidth": 100_u64 << 30, "xbzrle-cache-size": 256 << 20, "multifd-channels": 2,
            "multifd-compression": compression,
        });
        qmp.execute("migrate-set-parameters", parameters)?;
        Ok(())
    }
}

/// A guest in a QEMU that was started by hand.
pub struct ByQemu {
    /// Its folder goes with it.
    _lab: Lab,
    folder: PathBuf,
    line: Vec<String>,
    heart: Heartbeat,
    child: Child,
    qmp: Qmp,
    /// How many QEMUs there were.
    number: usize,
}

impl ByQemu {
    /// Starts and fills one.
    pub fn start(dewar: &Path, mib: u64, mix: &str) -> Result<Self> {
        let lab = Lab::new(dewar)?;
        let folder = lab.guest_folder("g")?;
        let line = command(&folder, mib)?;
        let heart = listen(&folder)?;
        let (child, mut console) = start_qemu(&with_qmp(&line, &folder, 0), &folder)?;
        console.wait_ready(PATIENCE)?;
        fill(&mut console, mib, mix)?;
        let qmp = connect_soon(&socket(&folder, 0))?;
        Ok(Self { _lab: lab, folder, line, heart, child, qmp, number: 0 })
    }

    /// Moves it into another QEMU. Nothing is measured where that does not end.
    pub fn measure(
        &mut self,
        method: Method,
        mbit: f64,
        writes: (Load, u64),
    ) -> Result<Option<Figures>> {
        let mut console = Console::connect(&self.folder.join("console"))?;
        load(&mut console, writes)?;
        drop(console);
        let number = self.number + 1;
        let mut line = with_qmp(&self.line, &self.folder, number);
        line.extend(["-incoming", "defer"].map(str::to_owned));
        let (child, _) = start_qemu(&line, &self.folder)?;
        let mut there = connect_soon(&socket(&self.folder, number))?;
        method.set(&mut there)?;
        method.set(&mut self.qmp)?;
        let port = free_port().context("a port")?;
        there.execute("migrate-incoming", json!({"uri": format!("tcp:127.0.0.1:{port}")}))?;
        let (proxy, lane) = proxy(port, LinkSpeed::new(mbit, 0.0))?;
        let qmp = &mut self.qmp;
        let mut stays = false;
        let figures = time(&self.heart, || {
            qmp.execute("migrate", json!({"uri": format!("tcp:127.0.0.1:{proxy}")}))?;
            if method == Method::PostCopy {
                start_post_copy(qmp)?;
            }
            stays = wait_for_migration(qmp, PATIENCE).is_err();
            Ok(lane.bytes())
        })?;
        if stays {
            let mut child = child;
            let _ = child.kill();
            let _ = child.wait();
            return Ok(None);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        (self.child, self.qmp, self.number) = (child, there, number);
        Ok(Some(figures))
    }
}

impl Drop for ByQemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lets the other QEMU run the guest when every page was sent once.
fn start_post_copy(qmp: &mut Qmp) -> Result<()> {
    loop {
        let report = qmp.execute("query-migrate", json!({}))?;
        if report["ram"]["dirty-sync-count"].as_u64().is_some_and(|count| count > 1) {
            break;
        }
        if report["status"] == "completed" {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // It may have ended in this moment.
    let _ = qmp.execute("migrate-start-postcopy", json!({}));
    Ok(())
}

fn socket(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("qmp{number}"))
}

fn with_qmp(line: &[String], folder: &Path, number: usize) -> Vec<String> {
    let qmp = format!("unix:{},server=on,wait=off", socket(folder, number).display());
    line.iter().cloned().chain(["-qmp".to_owned(), qmp]).collect()
}

/// A port that leads over a link to another one, for as many connections as come; and the lane that
/// leads there.
fn proxy(to: u16, speed: LinkSpeed) -> Result<(u16, Arc<Lane>)> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    let (there, back) = (Lane::new(speed), Lane::new(speed));
    let lane = Arc::clone(&there);
    std::thread::spawn(move || -> Result<()> {
        loop {
            let (ours, _) = listener.accept()?;
            let theirs = TcpStream::connect(("127.0.0.1", to))?;
            ours.set_nodelay(true)?;
            theirs.set_nodelay(true)?;
            let (from, into) = (theirs.try_clone()?, ours.try_clone()?);
            let forward = carry(ours, theirs.try_clone()?, &there);
            carry(from, into, &back);
            // The end of one direction is the end of it there.
            std::thread::spawn(move || {
                let _ = forward.join();
                let _ = theirs.shutdown(std::net::Shutdown::Write);
            });
        }
    });
    Ok((port, lane))
}
