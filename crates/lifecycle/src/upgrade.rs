//! `upgrade`: another QEMU under a guest that runs.

use crate::attached_guest::AttachedGuest;
use crate::failure::{Code, Failure, GONE};
use crate::guardian::Guardian;
use crate::held_ram::is_link;
use crate::reporter::Reporter;
use crate::tracking::{self, Tracking, written_before};
use dewar_guest::{Guest, Health};
use dewar_guest_qemu::QemuGuest;
use dewar_guest_qemu::handover::{HandoverError, Moved, Plan};
use dewar_memory::ProcessHandle;
use std::path::Path;

/// Moves a guest to a new QEMU, by a plan that was made for it.
///
/// # Errors
/// Where it was not moved, or not all of it; the failure says how the guest is.
pub fn upgrade(
    root: &Path,
    attached: &mut AttachedGuest,
    plan: Plan,
    reporter: &dyn Reporter,
) -> Result<Moved, Failure> {
    let AttachedGuest { guest, folder, lock } = attached;
    if guest.record().ram.iter().any(|file| is_link(&file.path)) {
        let name = folder.name();
        let what =
            format!("the memory of '{name}' has no name since the host's kernel was replaced");
        return Err(Failure::new(Code::Unsupported, what)
            .state("the guest was not touched")
            .advice(format!("'dewar freeze {name}' and 'dewar thaw {name}' give it one")));
    }
    let tracking = Tracking::load(folder, guest.record())?;
    let guardian = Guardian::start(root, folder.name(), None, Some(guest.qmp()), lock)?;
    reporter.stage("starting the new QEMU");
    if let Some(tracking) = &tracking {
        tracking.invalidate(folder)?;
    }
    match move_guest(guest, plan, tracking.as_ref(), reporter) {
        Ok((moved, tracked)) => {
            if let Some(tracking) = tracked {
                // Without it the next checkpoint compares; it loses nothing.
                let _ = tracking.save(folder);
            }
            guardian.dismiss();
            Ok(moved)
        }
        // The guardian goes on with it when we end.
        Err(error @ HandoverError::Unfinished(_)) => Err(error.into()),
        Err(error) => {
            let health = guest.health();
            let crashed = matches!(error, HandoverError::Crashed | HandoverError::Unknown(..));
            let is_known = matches!(
                health,
                Health::Running
                    | Health::Paused
                    | Health::Stands(_)
                    | Health::Gone
                    | Health::ShutDown
            );
            if crashed || is_known {
                guardian.dismiss();
            }
            let failure = Failure::from(error);
            Err(if crashed { failure } else { explain(failure, &health) })
        }
    }
}

/// Starts the new QEMU and moves the guest to it. Returns what is tracked there.
fn move_guest(
    guest: &mut QemuGuest,
    plan: Plan,
    tracking: Option<&Tracking>,
    reporter: &dyn Reporter,
) -> Result<(Moved, Option<Tracking>), HandoverError> {
    let (old_ram, old) = (guest.ram(), guest.process().pid());
    let old = ProcessHandle::open(old).map_err(|error| HandoverError::Guest(error.into()))?;
    let mut waiting = plan.start(guest)?;
    reporter.stage("started");
    let tracking = tracking.filter(|tracking| tracking.since.is_some());
    // Where the new process cannot be tracked the next checkpoint compares.
    let new = tracking.and_then(|_| {
        let (process, ram, origin) = waiting.memory().ok()?;
        tracking::arm(&process, &ram, origin).ok()
    });
    let mut carried = None;
    reporter.stage("armed");
    let moved = waiting.go(&|step| reporter.reached(step), &mut || {
        carried = tracking.and_then(|tracking| written_before(&old, &old_ram, tracking).ok()?);
    })?;
    reporter.reached("moved");
    let tracked = tracking.zip(new).zip(carried).map(|((tracking, tracker), before)| {
        tracking.continued(moved.record.process, tracker, &before)
    });
    Ok((moved, tracked))
}

fn explain(failure: Failure, health: &Health) -> Failure {
    let failure = failure.state(format!("the guest was not moved; {health}"));
    match health {
        Health::Unknown(_) => failure.attention().advice("'dewar ps' tries to put it right"),
        Health::Gone => failure.attention().advice(GONE),
        _ => failure,
    }
}
