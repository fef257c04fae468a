//! A guest with all its memory in use, whose heart is heard whichever QEMU has it.

use anyhow::{Context, Result, ensure};
use dewar_testkit::bench::{reserved_mib, sample_file};
use dewar_testkit::{Console, GuestSpec, Heartbeat};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::path::Path;
use std::time::{Duration, Instant};

const HEART: &str = "beat";
/// A guest has its load for so long before anything is measured.
const WARM_UP: Duration = Duration::from_secs(1);
/// What comes a little later of the change counts, too.
const AFTER: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(60);

/// What one migration gave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    pub total_s: f64,
    pub gap_ms: f64,
    pub bytes: f64,
}

/// The command line of a guest, in `folder`, whose heartbeat goes to a FIFO.
pub fn command(folder: &Path, mib: u64) -> Result<Vec<String>> {
    let sample = Some(sample_file(Path::new("target/bench"))?);
    let spec = GuestSpec { memory_mib: mib, beat_ms: 1, sample, ..GuestSpec::default() };
    let mut line = spec.command(folder)?;
    let fifo = folder.join(HEART);
    if !fifo.exists() {
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    }
    let beat = format!("file,id=s1,path={},append=on", fifo.display());
    let is_beat = |word: &&mut String| word.starts_with("socket,id=s1,");
    *line.iter_mut().find(is_beat).context("a heartbeat")? = beat;
    Ok(line)
}

/// Listens to its heart; to be called before its QEMU starts.
pub fn listen(folder: &Path) -> Result<Heartbeat> {
    Heartbeat::listen_fifo(&folder.join(HEART))
}

/// Puts all of its memory to use, as `fill` of the guest's program says.
pub fn fill(console: &mut Console, mib: u64, mix: &str) -> Result<()> {
    let reserved = reserved_mib(mib.div_ceil(1024)).min(mib * 3 / 4);
    console.ask(&format!("fill {} {mix}", mib - reserved)).map(drop)
}

/// Lets it write so many words a second.
pub fn load(console: &mut Console, rate: u64) -> Result<()> {
    console.ask(&format!("words {rate}"))?;
    std::thread::sleep(WARM_UP);
    Ok(())
}

/// Times a migration that `migrate` makes; it returns what was sent.
pub fn time(heart: &Heartbeat, migrate: impl FnOnce() -> Result<u64>) -> Result<Figures> {
    let from = Instant::now();
    let bytes = migrate()?;
    let done = Instant::now();
    while heart.first_after(done).is_none() {
        ensure!(done.elapsed() < PATIENCE, "no heartbeat after the migration");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(AFTER);
    let gap = heart.between(from, Instant::now()).longest_gap;
    Ok(Figures {
        total_s: (done - from).as_secs_f64(),
        gap_ms: gap.as_secs_f64() * 1e3,
        bytes: bytes as f64,
    })
}
