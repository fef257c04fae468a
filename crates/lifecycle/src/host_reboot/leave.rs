//! The old kernel is left: guests are frozen, and the new kernel starts.

use super::at_once::{Gate, at_once};
use super::bridges::bridged_taps;
use super::live_memory::{self, OpenRam};
use super::note::{KeptGuest, Note, Stage, Times};
use super::own_command::own_command;
use super::plan::{Fallback, How, Plan};
use super::recover::undo;
use super::watcher::Watcher;
use crate::attached_guest::AttachedGuest;
use crate::clock::now_ms;
use crate::failure::{Code, Failure};
use crate::freeze::{Place, freeze_when};
use crate::host::Host;
use crate::reporter::Reporter;
use dewar_hostreboot::kexec;
use dewar_kernel::guest_tsc_khz;
use dewar_registry::{GuestLock, GuestRecord, Kept, Phase, ProcessId};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

/// How long another command may have a guest.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long it may take to write to disk what programs have written: after that a file system does not answer.
const SYNC_WITHIN: Duration = Duration::from_secs(300);
/// The tag of checkpoints that are taken for the case of a loss.
const TAG: &str = "host-reboot";

/// Does what was planned. It returns where the init system goes on with it, or where it failed; with `now` only
/// where it failed.
///
/// # Errors
/// What failed; all guests run on, or the failure says which does not.
pub fn leave(host: &Host, plan: &Plan, reporter: &dyn Reporter) -> Result<(), Failure> {
    plan.require()?;
    // Held until the new kernel starts.
    let _lock = host.registry.lock_host()?;
    reporter.stage("loading the new kernel");
    // Should this command die, the next one unloads it.
    note(plan, Vec::new()).save(host)?;
    kexec::load(&plan.kernel, plan.initrd.as_deref(), &plan.line)
        .inspect_err(|_| drop(Note::remove(host)))?;
    reporter.reached("loaded");
    let prepared = (|| -> Result<_, Failure> {
        let mut guests = take_fallbacks(host, plan, reporter)?;
        let files = live_memory::open(host, &mut guests, |name| plan.is_kept_by_kernel(name))?;
        let note = note(plan, guests);
        let open: Vec<&File> = files.iter().map(OpenRam::file).collect();
        note.save(host)?;
        let watcher = Watcher::start(host, &open)?;
        Ok((files, note, watcher))
    })();
    let (files, mut note, watcher) = prepared.inspect_err(|_| {
        drop(kexec::unload());
        drop(Note::remove(host));
    })?;
    reporter.reached("noted");
    let gone = leave_others(host, plan, reporter).and_then(|()| {
        let _preserved = live_memory::preserve(host, &files, &watcher)?;
        reporter.reached("preserved");
        freeze_and_go(host, plan, &mut note, &watcher, reporter)
    });
    let Err(failure) = gone else {
        // The init system ends all processes; what is frozen stays so.
        watcher.dismiss();
        return Ok(());
    };
    match undo(host, &note, reporter)?.into_iter().next() {
        None => {
            watcher.dismiss();
            let stopped: Vec<&str> =
                plan.names(How::Stop).filter(|name| !runs(host, name)).collect();
            Err(failure.state(match stopped.is_empty() {
                true => "the host was not rebooted; all guests run on".to_owned(),
                false => format!(
                    "the host was not rebooted; {} was shut down, all others run on",
                    stopped.join(", ")
                ),
            }))
        }
        // The watcher has the memory of one that does not go on, and tries again.
        Some(worse) => Err(worse.attention()),
    }
}

/// One whose state cannot be read is taken for running.
fn runs(host: &Host, name: &str) -> bool {
    let record = host.registry.guest(name).and_then(|folder| folder.record());
    record.map_or(true, |record| record.process.is_alive())
}

fn note(plan: &Plan, guests: Vec<KeptGuest>) -> Note {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    Note {
        command: ProcessId::of(own).unwrap_or(ProcessId { pid: own, started: 0, boot: 0 }),
        stage: Stage::Freezing,
        by_init: !plan.now,
        kernel: plan.kernel.version.clone(),
        mounts: plan.mounts.clone(),
        guests,
        others: plan.names(How::Store).map(str::to_owned).collect(),
        tsc_khz: guest_tsc_khz().ok(),
        tsc_faster_ppm: None,
        times: Times::default(),
    }
}

/// Takes a checkpoint of each guest that is kept, where that was asked for.
fn take_fallbacks(
    host: &Host,
    plan: &Plan,
    reporter: &dyn Reporter,
) -> Result<Vec<KeptGuest>, Failure> {
    let kept = |name: &str| -> Result<KeptGuest, Failure> {
        let fallback = match plan.fallback {
            Fallback::None => None,
            Fallback::Checkpoint => {
                reporter.stage(&format!("taking a checkpoint of {name}"));
                let told = own_command(host, ["checkpoint", name, "--tag", TAG])?;
                told["checkpoint"].as_str().map(str::to_owned)
            }
        };
        let taps = bridged_taps(host.registry.guest(name)?.record()?.process.pid);
        let tokens = Vec::new();
        Ok(KeptGuest { name: name.to_owned(), tokens, taps, fallback, outcome: None })
    };
    plan.names(How::Kept).map(kept).collect()
}

/// Saves or ends the guests whose memory is not kept; those that are kept run meanwhile.
fn leave_others(host: &Host, plan: &Plan, reporter: &dyn Reporter) -> Result<(), Failure> {
    for name in plan.names(How::Stop) {
        reporter.stage(&format!("shutting {name} down"));
        own_command(host, ["stop", name])?;
    }
    for name in plan.names(How::Store) {
        reporter.stage(&format!("saving {name}"));
        own_command(host, ["freeze", name, "--to-store"])?;
    }
    Ok(())
}

fn freeze_and_go(
    host: &Host,
    plan: &Plan,
    note: &mut Note,
    watcher: &Watcher,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    sync_before_freeze(reporter)?;
    reporter.stage("freezing");
    freeze_all(host, plan, note, watcher, reporter)?;
    reporter.reached("frozen");
    // Nobody lets one go on, or starts another, whose kernel is about to end.
    let (_locks, records) = lock_all(host, note)?;
    note.times.stopped_ms =
        records.iter().filter_map(|it| it.frozen.as_ref().and_then(|it| it.stopped_ms)).min();
    reporter.stage("writing to disk");
    write_out(host, &records)?;
    note.stage = Stage::Leaving;
    note.times.left_ms = Some(now_ms());
    note.save(host)?;
    reporter.reached("leaving");
    if plan.now {
        return Err(Failure::new(Code::Failed, dewar_kernel::kexec().to_string()));
    }
    let failed = |why: String| Failure::new(Code::Failed, format!("systemctl kexec: {why}"));
    let status = Command::new("systemctl").arg("kexec").status();
    match status.map_err(|error| failed(error.to_string()))? {
        status if status.success() => {
            note.stage = Stage::HandedOver;
            // Init is on its way: whatever becomes of this word, nothing is to be undone.
            let _ = note.save(host);
            Ok(())
        }
        status => Err(failed(status.to_string())),
    }
}

/// Has on disk what programs have written, while the guests run: the new kernel does not have it otherwise, and once
/// they are frozen they would wait for it.
fn sync_before_freeze(reporter: &dyn Reporter) -> Result<(), Failure> {
    reporter.stage("writing to disk");
    let (done, synced) = mpsc::channel();
    std::thread::spawn(move || {
        rustix::fs::sync();
        let _ = done.send(());
    });
    synced.recv_timeout(SYNC_WITHIN).map_err(|_| {
        let what = "what programs have written is not on disk after 5 minutes";
        Failure::new(Code::Failed, what).advice(
            "a file system does not answer, one on a network perhaps: 'sync -f' on each finds it",
        )
    })
}

/// Freezes all guests that are kept: when each is ready they stop together, or none does.
fn freeze_all(
    host: &Host,
    plan: &Plan,
    note: &Note,
    watcher: &Watcher,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    let gate = Gate::new(note.guests.len());
    let freeze = |kept: &KeptGuest| -> Result<(), Failure> {
        let attached = AttachedGuest::lock(host, &kept.name, PATIENCE, reporter)?;
        let holder = (!kept.tokens.is_empty()).then(|| watcher.pid());
        let place = Place::InPlace { checksums: plan.checksums, holder };
        let together = || match gate.wait() {
            true => Ok(()),
            false => Err(Failure::new(Code::Failed, "another guest could not be frozen")),
        };
        freeze_when(host.registry.root(), attached, place, together, reporter).map(drop)
    };
    let results = at_once(&note.guests, |kept| {
        // The first that fails tells more than those that then were not stopped.
        freeze(kept).map_err(|failure| (gate.fail(), kept.name.clone(), failure))
    });
    let failures = results.into_iter().filter_map(Result::err);
    let first = failures.max_by_key(|(is_first, ..)| *is_first);
    first.map_or(Ok(()), |(_, name, failure)| {
        Err(Failure::new(Code::Failed, format!("'{name}': {}", failure.whole())))
    })
}

/// The locks of all guests, and the records of those that were to be frozen, which are.
fn lock_all(host: &Host, note: &Note) -> Result<(Vec<GuestLock>, Vec<GuestRecord>), Failure> {
    let (mut locks, mut kept) = (Vec::new(), Vec::new());
    for (folder, _) in host.guests()? {
        let lock = folder.lock_within(PATIENCE)?;
        let record = folder.record()?;
        let is_kept = note.guests.iter().any(|it| it.name == record.name);
        if is_kept && record.phase != Phase::Frozen {
            let what = format!("'{}' was thawed meanwhile", record.name);
            return Err(Failure::new(Code::Failed, what));
        }
        if !is_kept && record.container.is_none() && record.process.is_alive() {
            let what = format!("'{}' was started meanwhile", record.name);
            return Err(Failure::new(Code::Failed, what));
        }
        locks.push(lock);
        kept.extend(is_kept.then_some(record));
    }
    Ok((locks, kept))
}

/// Has on disk what the guests need again: their disks, their memory's file system, what is known of them. Other file
/// systems are not asked: one on a network that is gone would wait for ever.
fn write_out(host: &Host, records: &[GuestRecord]) -> Result<(), Failure> {
    let mut folders = BTreeSet::from([host.registry.root().to_owned()]);
    for record in records {
        let Some(Kept::InPlace { disks, .. }) = record.frozen.as_ref().map(|it| &it.kept) else {
            continue;
        };
        let files = disks.iter().map(|disk| &disk.path).chain(record.ram.iter().map(|it| &it.path));
        for path in files {
            // A link's own folder may be on another file system than the file.
            let real = std::fs::canonicalize(path);
            let path = real.as_deref().unwrap_or(path);
            folders.extend(path.parent().map(Path::to_owned));
        }
    }
    let write = |folder: &PathBuf| {
        let failed = |error: std::io::Error| {
            Failure::new(
                Code::Failed,
                format!("cannot write {} to disk: {error}", folder.display()),
            )
        };
        let opened = File::open(folder).map_err(failed)?;
        rustix::fs::syncfs(&opened).map_err(|error| failed(error.into()))
    };
    folders.iter().try_for_each(write)
}
