//! The old kernel is left: guests are frozen, and the new kernel starts.

use super::at_once::{Gate, at_once};
use super::bridges::bridged_taps;
use super::live_memory::{self, OpenRam};
use super::note::{KeptGuest, Note, Stage};
use super::own_command::own_command;
use super::plan::{Fallback, How, Plan};
use super::recover::thaw_kept;
use super::watcher::Watcher;
use crate::attached_guest::AttachedGuest;
use crate::clock::now_ms;
use crate::failure::{Code, Failure};
use crate::freeze::{Place, freeze_when};
use crate::host::Host;
use crate::reporter::Reporter;
use dewar_hostreboot::kexec;
use dewar_kernel::guest_tsc_khz;
use dewar_registry::{GuestLock, Phase, ProcessId};
use std::process::Command;
use std::time::Duration;

/// How long another command may have a guest.
const PATIENCE: Duration = Duration::from_secs(5);
/// The tag of checkpoints that are taken for the case of a loss.
const TAG: &str = "host-reboot";

/// Saves or ends the guests whose memory is not kept; those that are kept run meanwhile.
///
/// # Errors
/// Where one is not; those that were frozen before it go on.
pub fn leave_others(host: &Host, plan: &Plan, reporter: &dyn Reporter) -> Result<(), Failure> {
    for name in plan.names(How::Stop) {
        reporter.stage(&format!("shutting {name} down"));
        own_command(host, ["stop", name])?;
    }
    let names: Vec<&str> = plan.names(How::Store).collect();
    for (at, name) in names.iter().enumerate() {
        reporter.stage(&format!("saving {name}"));
        if let Err(failure) = own_command(host, ["freeze", name, "--to-store"]) {
            thaw_others(host, &names[..at]);
            return Err(failure);
        }
    }
    Ok(())
}

fn thaw_others(host: &Host, names: &[&str]) {
    for name in names {
        // What does not go on stays in the store, and 'dewar ps' tells of it.
        let _ = own_command(host, ["thaw", name]);
    }
}

/// Does what was planned. It returns where the init system goes on with it, or where it failed; with `now` only
/// where it failed.
///
/// # Errors
/// What failed; all guests run on, or the failure says which does not.
pub fn leave(host: &Host, plan: &Plan, reporter: &dyn Reporter) -> Result<(), Failure> {
    plan.require()?;
    reporter.stage("loading the new kernel");
    kexec::load(&plan.kernel, plan.initrd.as_deref(), &plan.line)?;
    reporter.reached("loaded");
    let unload = |_: &Failure| drop(kexec::unload());
    let mut guests = take_fallbacks(host, plan, reporter).inspect_err(unload)?;
    let files = live_memory::open(host, &mut guests, |name| plan.is_kept_by_kernel(name));
    let files = files.inspect_err(unload)?;
    leave_others(host, plan, reporter).inspect_err(unload)?;
    let others: Vec<&str> = plan.names(How::Store).collect();
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let command = ProcessId::of(own).unwrap_or(ProcessId { pid: own, started: 0, boot: 0 });
    let mut note = Note {
        command,
        stage: Stage::Freezing,
        by_init: !plan.now,
        kernel: plan.kernel.version.clone(),
        mounts: plan.mounts.clone(),
        guests,
        others: others.iter().map(|name| (*name).to_owned()).collect(),
        tsc_khz: guest_tsc_khz().ok(),
        tsc_faster_ppm: None,
        stopped_ms: None,
        left_ms: None,
        arrived_ms: None,
        booted_for_ms: None,
        back_ms: None,
    };
    let open: Vec<_> = files.iter().map(OpenRam::file).collect();
    let begun = note.save(host).and_then(|()| Watcher::start(host, &open));
    let watcher = begun.inspect_err(|failure| {
        thaw_others(host, &others);
        let _ = Note::remove(host);
        unload(failure);
    })?;
    reporter.reached("noted");
    let preserved = live_memory::preserve(host, &files, &watcher);
    let gone = preserved.and_then(|_preserved| {
        reporter.reached("preserved");
        freeze_and_go(host, plan, &mut note, reporter)
    });
    match gone {
        // The init system ends all processes; what is frozen stays so.
        Ok(()) => {
            watcher.dismiss();
            Ok(())
        }
        Err(failure) => {
            let failures = thaw_kept(host, &note, reporter);
            live_memory::leave_to_qemu(host, &note);
            thaw_others(host, &others);
            let removed = Note::remove(host);
            unload(&failure);
            watcher.dismiss();
            removed?;
            Err(match failures.into_iter().next() {
                None => failure.state("the host was not rebooted; all guests run on"),
                Some(worse) => worse.attention(),
            })
        }
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

fn freeze_and_go(
    host: &Host,
    plan: &Plan,
    note: &mut Note,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    reporter.stage("freezing");
    freeze_all(host, plan, note, reporter)?;
    reporter.reached("frozen");
    // Nobody lets one go on, or starts another, whose kernel is about to end.
    let _locks = lock_all(host, note)?;
    note.stopped_ms = first_stop(host, note)?;
    reporter.stage("writing to disk");
    rustix::fs::sync();
    note.stage = Stage::Leaving;
    note.left_ms = Some(now_ms());
    note.save(host)?;
    reporter.reached("leaving");
    if plan.now {
        return Err(Failure::new(Code::Failed, dewar_kernel::kexec().to_string()));
    }
    let failed = |why: String| Failure::new(Code::Failed, format!("systemctl kexec: {why}"));
    let status = Command::new("systemctl").arg("kexec").status();
    match status.map_err(|error| failed(error.to_string()))? {
        status if status.success() => Ok(()),
        status => Err(failed(status.to_string())),
    }
}

/// Freezes all guests that are kept: when each is ready they stop together, or none does.
fn freeze_all(
    host: &Host,
    plan: &Plan,
    note: &Note,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    let gate = Gate::new(note.guests.len());
    let freeze = |kept: &KeptGuest| -> Result<(), Failure> {
        let attached = AttachedGuest::lock(host, &kept.name, PATIENCE, reporter)?;
        // What is beside memory that the kernel keeps is lost.
        let state_on_disk = !kept.tokens.is_empty();
        let place = Place::InPlace { checksums: plan.checksums, state_on_disk };
        let together = || match gate.wait() {
            true => Ok(()),
            false => Err(Failure::new(Code::Failed, "another guest could not be frozen")),
        };
        freeze_when(host.registry.root(), attached, place, together, reporter).map(drop)
    };
    let results = at_once(&note.guests, |kept| {
        freeze(kept).inspect_err(|_| gate.fail()).map_err(|failure| (kept.name.clone(), failure))
    });
    let failures = results.into_iter().filter_map(Result::err);
    // The one that failed by itself tells more than those that then were not stopped.
    let first = failures.max_by_key(|(_, failure)| !failure.what().starts_with("another guest"));
    first.map_or(Ok(()), |(name, failure)| {
        Err(Failure::new(Code::Failed, format!("'{name}': {}", failure.whole())))
    })
}

/// When the first of the guests was stopped.
fn first_stop(host: &Host, note: &Note) -> Result<Option<u64>, Failure> {
    let stop = |kept: &KeptGuest| -> Result<Option<u64>, Failure> {
        let record = host.registry.guest(&kept.name)?.record()?;
        Ok(record.frozen.and_then(|frozen| frozen.stopped_ms))
    };
    let stops: Vec<Option<u64>> = note.guests.iter().map(stop).collect::<Result<_, _>>()?;
    Ok(stops.into_iter().flatten().min())
}

/// The locks of all guests; each that was to be frozen is.
fn lock_all(host: &Host, note: &Note) -> Result<Vec<GuestLock>, Failure> {
    let mut locks = Vec::new();
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
    }
    Ok(locks)
}
