//! A guest with all its memory in use, whose heart is heard whichever QEMU has it.

use anyhow::{Result, ensure};
use dewar_bench::{beat_into_fifo, reserved_mib, sample_file};
use dewar_testkit::{Console, GuestSpec, Heartbeat};
use std::path::Path;
use std::time::{Duration, Instant};

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
    let spec = GuestSpec { memory_mib: mib, beat_ms: 1, sample, ..GuestSpec::measured() };
    let mut line = spec.command(folder)?;
    beat_into_fifo(&mut line, folder)?;
    Ok(line)
}

/// Puts all of its memory to use, as `fill` of the guest's program says.
pub fn fill(console: &mut Console, mib: u64, mix: &str) -> Result<()> {
    let reserved = reserved_mib(mib.div_ceil(1024)).min(mib * 3 / 4);
    console.ask(&format!("fill {} {mix}", mib - reserved)).map(drop)
}

/// What a guest writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// A word in each of so many pages a second.
    Words,
    /// All of so many pages a second, each with one word again and again.
    Colour,
}

impl Load {
    /// By its name on the command line.
    pub fn named(word: &str) -> Option<Self> {
        [Self::Words, Self::Colour].into_iter().find(|load| load.word() == word)
    }

    fn word(self) -> &'static str {
        match self {
            Self::Words => "words",
            Self::Colour => "colour",
        }
    }

    /// What is counted.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Words => "words/s",
            Self::Colour => "coloured pages/s",
        }
    }
}

/// Lets it write so much a second.
pub fn load(console: &mut Console, (load, rate): (Load, u64)) -> Result<()> {
    console.ask(&format!("{} {rate}", load.word()))?;
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
