//! The new kernel runs: guests are thawed.

use super::at_once::at_once;
use super::bridges::join_bridges;
use super::live_memory::{Retrieved, keep_unthawed};
use super::note::{KeptGuest, Note, Outcome, Stage, since};
use super::own_command::own_command;
use super::recover::thaw_kept;
use crate::clock::now_ms;
use crate::failure::Failure;
use crate::host::Host;
use crate::ram_dir::ram_dir;
use crate::reporter::Reporter;
use crate::thaw::{ThawOptions, is_frozen, thaw_in_place};
use dewar_kernel::guest_tsc_khz;
use dewar_registry::{GuestRecord, Kept};
use std::fs::{self, File};
use std::time::Duration;

/// How long another command may have a guest.
const PATIENCE: Duration = Duration::from_secs(30);

/// What was found after a boot.
#[derive(Debug)]
pub enum Arrival {
    /// No reboot of the host that guests were kept for.
    Nothing,
    /// The host was not rebooted: the guests that had been frozen for it go on; what of that failed.
    NotRebooted(Vec<Failure>),
    /// It was.
    Rebooted(Box<Note>),
}

/// Lets the guests go on that were kept.
///
/// # Errors
/// Where what is known of them cannot be read or written.
pub fn arrive(host: &Host, reporter: &dyn Reporter) -> Result<Arrival, Failure> {
    let arrived_ms = now_ms();
    let Some(mut note) = Note::load(host)?.filter(|note| note.stage != Stage::Back) else {
        return Ok(Arrival::Nothing);
    };
    if note.command.is_of_this_boot() {
        if note.command.is_alive() {
            return Ok(Arrival::Nothing);
        }
        let failures = thaw_kept(host, &note, reporter);
        Note::remove(host)?;
        return Ok(Arrival::NotRebooted(failures));
    }
    note.arrived_ms = Some(arrived_ms);
    note.booted_for_ms = uptime_ms();
    reporter.stage("looking for the guests' memory");
    let mounted: Result<(), _> = note.mounts.iter().try_for_each(|mount| mount.mount_again());
    let memory = Memory {
        unmounted: mounted.err().map(|error| error.to_string()),
        retrieved: retrieve(host, &note).map_err(|failure| failure.what().to_owned()),
    };
    reporter.stage("thawing");
    let outcomes = at_once(&note.guests, |kept| {
        thaw(host, kept, &memory, reporter)
            .unwrap_or_else(|failure| Outcome::Failed { why: failure.whole() })
    });
    if let Ok(Some(retrieved)) = &memory.retrieved {
        retrieved.finish();
    }
    for (kept, outcome) in note.guests.iter_mut().zip(outcomes) {
        kept.outcome = Some(outcome);
    }
    note.back_ms = Some(now_ms());
    note.tsc_faster_ppm = note.tsc_khz.zip(guest_tsc_khz().ok()).map(|(old, new)| faster(old, new));
    note.stage = Stage::Back;
    note.save(host)?;
    for name in &note.others {
        reporter.stage(&format!("thawing {name}"));
        if let Err(failure) = own_command(host, ["thaw", name]) {
            reporter.warn(&format!("'{name}': {}", failure.whole()));
        }
    }
    Ok(Arrival::Rebooted(Box::new(note)))
}

/// Where the guests' memory is now.
struct Memory {
    /// Why a file system of it is not mounted.
    unmounted: Option<String>,
    /// What the kernel kept, or why it did not.
    retrieved: Result<Option<Retrieved>, String>,
}

fn retrieve(host: &Host, note: &Note) -> Result<Option<Retrieved>, Failure> {
    let retrieved = Retrieved::of(host, note)?;
    if retrieved.is_some() {
        // The folder of the links, with the file system that is usual there.
        ram_dir(None);
    }
    Ok(retrieved)
}

impl Memory {
    /// The files without a name of a guest's memory; or that it is lost, and why.
    fn of(&self, record: &GuestRecord, kept: &KeptGuest) -> Result<Vec<File>, String> {
        if kept.tokens.is_empty() {
            return self.unmounted.clone().map_or(Ok(Vec::new()), Err);
        }
        match &self.retrieved {
            Ok(Some(retrieved)) => {
                retrieved.memory_of(record, kept).map_err(|failure| failure.what().to_owned())
            }
            Ok(None) => Err("the kernel kept nothing".to_owned()),
            Err(why) => Err(why.clone()),
        }
    }
}

fn thaw(
    host: &Host,
    kept: &KeptGuest,
    memory: &Memory,
    reporter: &dyn Reporter,
) -> Result<Outcome, Failure> {
    let guest = host.lock_within(&kept.name, PATIENCE)?;
    let Some(frozen) = is_frozen(&guest.record).cloned() else {
        let why = match guest.record.process.is_alive() {
            true => "it runs already",
            false => "it is not frozen any more",
        };
        return Ok(Outcome::Failed { why: why.to_owned() });
    };
    let there = memory.of(&guest.record, kept);
    let there = there.and_then(|files| missing(&guest.record).map_or(Ok(files), Err));
    let files = match there {
        Ok(files) => files,
        Err(lost) => {
            drop(guest);
            return fall_back(host, kept, lost);
        }
    };
    let record = guest.record.clone();
    let options = ThawOptions { force: false, keep_clock: false };
    match thaw_in_place(guest, &frozen, options, reporter) {
        Ok(_) => {
            let outage_ms = since(frozen.stopped_ms);
            join_bridges(&kept.taps).iter().for_each(|why| reporter.warn(why));
            Ok(Outcome::Back { outage_ms })
        }
        Err(failure) => {
            if !files.is_empty() {
                keep_unthawed(host, &record)?;
            }
            Err(failure)
        }
    }
}

/// By how many millionths a counter is faster than it was.
fn faster(old: u32, new: u32) -> i64 {
    (i64::from(new) - i64::from(old)) * 1_000_000 / i64::from(old.max(1))
}

/// What of a frozen guest is not there.
fn missing(record: &GuestRecord) -> Option<String> {
    let Some(Kept::InPlace { state, .. }) = record.frozen.as_ref().map(|frozen| &frozen.kept)
    else {
        return None;
    };
    let is_whole = |path, bytes| fs::metadata(path).is_ok_and(|data| data.len() == bytes);
    let gone = record.ram.iter().find(|file| !is_whole(&file.path, file.bytes));
    let gone = gone.map(|file| &file.path).or_else(|| Some(state).filter(|it| !it.exists()));
    gone.map(|path| format!("{} is gone", path.display()))
}

/// A guest whose memory is lost goes on from the checkpoint that was taken for this case.
fn fall_back(host: &Host, kept: &KeptGuest, lost: String) -> Result<Outcome, Failure> {
    let Some(image) = &kept.fallback else {
        let why = format!(
            "its memory is lost: {lost}; 'dewar restore {} --replace' brings back its newest checkpoint",
            kept.name
        );
        return Ok(Outcome::Failed { why });
    };
    own_command(host, ["restore", image, "--as", &kept.name, "--replace"])?;
    Ok(Outcome::Restored { lost })
}

/// How long the kernel has run.
fn uptime_ms() -> Option<u64> {
    let text = fs::read_to_string("/proc/uptime").ok()?;
    let seconds: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(Duration::try_from_secs_f64(seconds).ok()?.as_millis() as u64)
}
