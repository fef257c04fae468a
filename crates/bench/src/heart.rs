//! A guest's heartbeat in a FIFO: whichever QEMU has the guest writes to it, and no connection is made anew.

use anyhow::{Context, Result};
use dewar_testkit::Heartbeat;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::path::Path;

/// The FIFO, in the guest's folder.
const FILE: &str = "beat";

/// Sends the heartbeat of a command line of [`GuestSpec`](dewar_testkit::GuestSpec) to the FIFO of this folder.
///
/// # Errors
/// Where the FIFO cannot be made, or the guest has no heartbeat.
pub fn beat_into_fifo(line: &mut [String], folder: &Path) -> Result<()> {
    let fifo = folder.join(FILE);
    if !fifo.exists() {
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    }
    // A log, for QEMU.
    let beat = format!("file,id=s1,path={},append=on", fifo.display());
    let is_beat = |word: &&mut String| word.starts_with("socket,id=s1,");
    *line.iter_mut().find(is_beat).context("a heartbeat")? = beat;
    Ok(())
}

/// Listens to it; to be called before the guest's QEMU starts.
///
/// # Errors
/// Where there is no FIFO.
pub fn listen(folder: &Path) -> Result<Heartbeat> {
    Heartbeat::listen_fifo(&folder.join(FILE))
}
