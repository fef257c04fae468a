//! The new kernel runs: guests are thawed.

use super::at_once::at_once;
use super::bridges::join_bridges;
use super::live_memory::{Retrieved, require_device};
use super::note::{KeptGuest, Note, Outcome, Stage, since};
use super::own_command::own_command;
use super::recover::{is_in_store, undo};
use crate::clock::{bring_forward, now_ms};
use crate::failure::Failure;
use crate::host::Host;
use crate::ram_dir::ram_dir;
use crate::reporter::Reporter;
use crate::thaw::{ThawOptions, is_frozen, thaw_in_place};
use dewar_hostreboot::{DaxMount, dax::MountError};
use dewar_kernel::guest_tsc_khz;
use dewar_registry::{GuestRecord, Kept};
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

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
    if Note::load(host)?.is_none_or(|note| note.stage == Stage::Back) {
        return Ok(Arrival::Nothing);
    }
    let _lock = host.registry.lock_host()?;
    // Another command may have dealt with it meanwhile.
    let Some(mut note) = Note::load(host)?.filter(|note| note.stage != Stage::Back) else {
        return Ok(Arrival::Nothing);
    };
    if note.command.is_of_this_boot() {
        return Ok(Arrival::NotRebooted(undo(host, &note, reporter)?));
    }
    require_device(&note)?;
    // Another command of ours was here, and died.
    let was_begun = note.times.arrived_ms.is_some();
    note.times.arrived_ms = Some(arrived_ms);
    note.times.booted_for_ms = uptime_ms();
    // Where this cannot be written the guests go on all the same.
    let _ = note.save(host);
    reporter.stage("looking for the guests' memory");
    let memory = Memory::find(host, &note);
    reporter.stage("thawing");
    let left = note.times.stopped_ms.filter(|_| was_begun);
    let outcomes = at_once(&note.guests, |kept| {
        thaw(host, kept, &memory, left, reporter)
            .unwrap_or_else(|failure| Outcome::Failed { why: failure.whole() })
    });
    for (kept, outcome) in note.guests.iter_mut().zip(outcomes) {
        kept.outcome = Some(outcome);
    }
    // Before it is on record that all are back.
    for name in &note.others {
        reporter.stage(&format!("thawing {name}"));
        let thawed = is_in_store(host, name).then(|| own_command(host, ["thaw", name]));
        if let Some(Err(failure)) = thawed {
            reporter.warn(&format!("'{name}': {}", failure.whole()));
        }
    }
    note.times.back_ms = Some(now_ms());
    note.tsc_faster_ppm = note.tsc_khz.zip(guest_tsc_khz().ok()).map(|(old, new)| faster(old, new));
    note.stage = Stage::Back;
    note.save(host)?;
    if let Ok(Some(retrieved)) = memory.retrieved {
        let is_frozen =
            |kept: &KeptGuest| kept.outcome.as_ref().is_some_and(|outcome| !outcome.runs());
        // It has the memory of one that does not run, as long as that does not.
        if !note.guests.iter().any(is_frozen) {
            retrieved.dismiss();
        }
    }
    Ok(Arrival::Rebooted(Box::new(note)))
}

/// Where the guests' memory is now.
struct Memory {
    /// The file systems that it lies on, and whether each is there.
    mounts: Vec<(PathBuf, Result<(), MountError>)>,
    /// What the kernel kept, or why it did not.
    retrieved: Result<Option<Retrieved>, Failure>,
}

impl Memory {
    fn find(host: &Host, note: &Note) -> Self {
        let mount = |it: &DaxMount| (it.point.clone(), it.mount_again());
        let mounts = note.mounts.iter().map(mount).collect();
        if note.guests.iter().any(|kept| !kept.tokens.is_empty()) {
            // The folder of the links, with the file system that is usual there.
            ram_dir(None);
        }
        Self { mounts, retrieved: Retrieved::of(host, note) }
    }

    /// Whether a guest's memory is there.
    fn of(&self, record: &GuestRecord, kept: &KeptGuest) -> Found {
        let Some(missing) = missing(record) else { return Found::There };
        if !kept.tokens.is_empty() {
            return match &self.retrieved {
                Ok(_) => Found::Lost(missing),
                Err(failure) => Found::Lost(failure.what().to_owned()),
            };
        }
        let is_its = |point: &PathBuf| record.ram.iter().any(|file| file.path.starts_with(point));
        let mount = self.mounts.iter().find(|(point, _)| is_its(point));
        match mount.map(|(_, mounted)| mounted) {
            Some(Err(error)) if error.is_lost => Found::Lost(error.to_string()),
            Some(Err(error)) => Found::NotYet(error.to_string()),
            _ => Found::Lost(missing),
        }
    }
}

/// Whether a guest's memory is there.
enum Found {
    There,
    /// It may come.
    NotYet(String),
    Lost(String),
}

fn thaw(
    host: &Host,
    kept: &KeptGuest,
    memory: &Memory,
    left: Option<u64>,
    reporter: &dyn Reporter,
) -> Result<Outcome, Failure> {
    let guest = host.lock_within(&kept.name, PATIENCE)?;
    let Some(frozen) = is_frozen(&guest.record).cloned() else {
        return Ok(not_frozen_any_more(&guest.record, kept, left, reporter));
    };
    match memory.of(&guest.record, kept) {
        Found::There => {}
        Found::NotYet(why) => {
            let again =
                format!("{why}; when that is mounted, 'dewar thaw {}' lets it go on", kept.name);
            return Ok(Outcome::Failed { why: again });
        }
        Found::Lost(lost) => {
            drop(guest);
            return fall_back(host, kept, lost);
        }
    }
    let options = ThawOptions { force: false, keep_clock: false };
    let thawed = thaw_in_place(guest, &frozen, options, reporter)?;
    let outage_ms = since(frozen.stopped_ms);
    join_bridges(&kept.taps).iter().for_each(|why| reporter.warn(why));
    Ok(Outcome::Back { outage_ms, process: thawed.record.process })
}

/// What became of a guest that another command dealt with. `left` is when the guests were stopped, where that was a command
/// of ours that died before it had noted it, and perhaps before it had set the guest's clock.
fn not_frozen_any_more(
    record: &GuestRecord,
    kept: &KeptGuest,
    left: Option<u64>,
    reporter: &dyn Reporter,
) -> Outcome {
    let process = record.process;
    if !process.is_alive() {
        return Outcome::Failed { why: "it is not frozen any more".to_owned() };
    }
    // That command may not have come to them.
    join_bridges(&kept.taps).iter().for_each(|why| reporter.warn(why));
    if let Some(left) = left {
        let left = SystemTime::UNIX_EPOCH + Duration::from_millis(left);
        let clock = bring_forward(false, left, &record.arguments, &record.folder);
        if let Err(why) = clock.set {
            reporter.warn(&format!("the clock of '{}' is behind: {why}", kept.name));
        }
    }
    let origin = record.origin.as_ref().map(|origin| &origin.image);
    match origin.is_some() && origin == kept.fallback.as_ref() {
        true => {
            Outcome::Restored { lost: "it was brought back from it meanwhile".to_owned(), process }
        }
        false => Outcome::RunsAlready { process },
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
    let name = &kept.name;
    let Some(image) = &kept.fallback else {
        let why = format!(
            "its memory is lost: {lost}; 'dewar restore {name} --replace' brings back its newest checkpoint"
        );
        return Ok(Outcome::Failed { why });
    };
    let restored = own_command(host, ["restore", image, "--as", name, "--replace"]);
    if let Err(failure) = restored {
        let what = format!("its memory is lost: {lost}; {}", failure.whole());
        return Ok(Outcome::Failed { why: what });
    }
    let process = host.registry.guest(name)?.record()?.process;
    Ok(Outcome::Restored { lost, process })
}

/// How long the kernel has run.
fn uptime_ms() -> Option<u64> {
    let text = fs::read_to_string("/proc/uptime").ok()?;
    let seconds: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(Duration::try_from_secs_f64(seconds).ok()?.as_millis() as u64)
}
