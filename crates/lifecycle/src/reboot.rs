//! `reboot`: a guest's OS is started anew, on the same QEMU.

use crate::failure::{Code, Failure};
use crate::locked_guest::LockedGuest;
use crate::process::{connect, qmp_failure};
use crate::served_disks::{LastReset, SearchState, ServedDisks, ServedState};
use dewar_guest_qemu::{Agent, QmpError};
use dewar_registry::GuestFolder;
use serde_json::json;
use std::time::{Duration, Instant};

/// How often it is looked whether the guest was reset.
const LOOK: Duration = Duration::from_millis(50);
/// How long its memory may be searched.
const SEARCHED_WITHIN: Duration = Duration::from_secs(60);
/// How long it may take until a reset is told of.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// How long QEMU may take for a reset that nobody has to ask the guest for.
const RESETS_WITHIN: Duration = Duration::from_secs(10);

/// What came of a reboot.
#[derive(Debug, Clone, PartialEq)]
pub struct Rebooted {
    /// Whether the guest did it itself, with its files written first.
    pub by_itself: bool,
    /// How long it was held for its memory to be set aside, in milliseconds; nothing where it has no warm disks.
    pub held_ms: Option<f64>,
    /// What was found in that memory.
    pub found: Option<SearchState>,
    /// Why nothing was kept, where it has warm disks.
    pub cold: Option<String>,
}

/// Has a guest reboot: by its agent, or by Ctrl-Alt-Delete where it has none; or, with `now`, by the reset button.
///
/// # Errors
/// Where its QEMU does not answer, or the guest does not obey in time.
pub fn reboot(guest: LockedGuest, timeout: Duration, now: bool) -> Result<Rebooted, Failure> {
    guest.require_alive()?;
    if guest.record.container.is_some() {
        let what = "a container has no OS of its own to boot";
        return Err(Failure::new(Code::Unsupported, what).state("it runs on"));
    }
    let folder = guest.folder.clone();
    let failed = |error: QmpError| qmp_failure(&guest.record, &error);
    let mut qmp = connect(&guest.record)?;
    let before = resets(&folder);
    let is_warm = ServedDisks::of(&folder)?.is_some_and(|disks| disks.is_any_warm());
    if now {
        qmp.execute("system_reset", json!({})).map_err(failed)?;
    } else if !asked_its_agent(&guest) {
        let keys = ["ctrl", "alt", "delete"].map(|key| json!({"type": "qcode", "data": key}));
        qmp.execute("send-key", json!({"keys": keys})).map_err(failed)?;
    }
    let timeout = if now { RESETS_WITHIN } else { timeout };
    let deadline = Instant::now() + timeout;
    let name = folder.name().to_owned();
    let unheard = || {
        Failure::new(
            Code::Failed,
            format!("'{name}' did not reboot within {} s", timeout.as_secs()),
        )
        .state("the guest runs on")
        .advice(format!(
            "'dewar reboot {name} --now' resets it, and what it has not written is lost"
        ))
    };
    if !is_warm {
        return match qmp.is_reset_within(timeout) {
            Ok(true) => Ok(Rebooted { by_itself: !now, held_ms: None, found: None, cold: None }),
            Ok(false) => Err(unheard()),
            Err(error) => Err(failed(error)),
        };
    }
    // Those who hold it at its reset need the guest.
    drop(guest);
    let mut reset_at = None;
    while resets(&folder) == before {
        if reset_at.is_none() && qmp.is_reset_within(LOOK).is_ok_and(|it| it) {
            reset_at = Some(Instant::now());
        }
        if reset_at.is_some_and(|at| at.elapsed() > TOLD_WITHIN) {
            // Right after another reset, or as its command line says.
            let cold = Some("QEMU reset it by itself".to_owned());
            return Ok(Rebooted { by_itself: !now, held_ms: None, found: None, cold });
        }
        if Instant::now() > deadline {
            return Err(unheard());
        }
        std::thread::sleep(LOOK);
    }
    Ok(told(&folder, now))
}

fn resets(folder: &GuestFolder) -> u64 {
    LastReset::of(folder).map_or(0, |last| last.held)
}

/// Whether a guest's agent took it upon itself.
fn asked_its_agent(guest: &LockedGuest) -> bool {
    let agent = Agent::of(&guest.record.arguments, &guest.record.folder, RESETS_WITHIN / 2);
    agent.and_then(Result::ok).is_some_and(|mut agent| agent.reboot().is_ok())
}

/// What is known of a reset when the memory has been searched.
fn told(folder: &GuestFolder, now: bool) -> Rebooted {
    let last = LastReset::of(folder).unwrap_or_default();
    let deadline = Instant::now() + SEARCHED_WITHIN;
    let mut found = None;
    while last.cold.is_none() && found.is_none() && Instant::now() < deadline {
        std::thread::sleep(LOOK);
        found = ServedState::of(folder)
            .and_then(|state| state.search)
            .filter(|search| search.reset == last.held);
    }
    Rebooted { by_itself: !now, held_ms: Some(last.held_ms), found, cold: last.cold }
}
