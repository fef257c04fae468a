//! The new kernel runs: guests are thawed.

use super::at_once::at_once;
use super::note::{KeptGuest, Note, Outcome, Stage, since, thaw_kept};
use super::own_command::own_command;
use crate::clock::now_ms;
use crate::failure::Failure;
use crate::host::Host;
use crate::reporter::Reporter;
use crate::thaw::{ThawOptions, is_frozen, thaw_in_place};
use dewar_registry::{GuestRecord, Kept};
use std::fs;
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
    Rebooted(Note),
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
    reporter.stage("mounting the guests' memory");
    let mounted: Result<(), _> = note.mounts.iter().try_for_each(|mount| mount.mount_again());
    let lost = mounted.err().map(|error| error.to_string());
    reporter.stage("thawing");
    let outcomes = at_once(&note.guests, |kept| bring_back(host, kept, lost.as_deref(), reporter));
    for (kept, outcome) in note.guests.iter_mut().zip(outcomes) {
        kept.outcome = Some(outcome);
    }
    note.back_ms = Some(now_ms());
    note.stage = Stage::Back;
    note.save(host)?;
    for name in &note.others {
        reporter.stage(&format!("thawing {name}"));
        if let Err(failure) = own_command(host, ["thaw", name]) {
            reporter.warn(&format!("'{name}': {}", failure.whole()));
        }
    }
    Ok(Arrival::Rebooted(note))
}

fn bring_back(
    host: &Host,
    kept: &KeptGuest,
    lost: Option<&str>,
    reporter: &dyn Reporter,
) -> Outcome {
    thaw(host, kept, lost, reporter)
        .unwrap_or_else(|failure| Outcome::Failed { why: failure.whole() })
}

fn thaw(
    host: &Host,
    kept: &KeptGuest,
    lost: Option<&str>,
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
    let lost = lost.map(str::to_owned).or_else(|| missing(&guest.record));
    if let Some(lost) = lost {
        drop(guest);
        return fall_back(host, kept, lost);
    }
    let options = ThawOptions { force: false, keep_clock: false };
    thaw_in_place(guest, &frozen, options, reporter)?;
    Ok(Outcome::Back { outage_ms: since(frozen.stopped_ms) })
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
