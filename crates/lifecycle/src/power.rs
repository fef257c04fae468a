//! A guest's power button.

use crate::failure::Failure;
use crate::process::{connect, qmp_failure};
use dewar_guest_qemu::{QmpError, RunState};
use dewar_registry::GuestRecord;
use serde_json::json;
use std::time::{Duration, Instant};

/// A guest that has stood still for so long does not hear of its power button.
const STANDS_STILL: Duration = Duration::from_secs(3);
/// How often it is looked whether the guest is off.
const LOOK: Duration = Duration::from_millis(100);

/// Presses the power button; says whether the guest obeyed. One that is off already, or
/// that stands still and so cannot hear of it, is not waited for.
///
/// # Errors
/// Where its QEMU does not answer.
pub fn power_down(record: &GuestRecord, timeout: Duration) -> Result<bool, Failure> {
    let deadline = Instant::now() + timeout;
    let failed = |error: &QmpError| qmp_failure(record, error);
    let mut qmp = connect(record)?;
    if RunState::of(&mut qmp).map_err(|error| failed(&error))?.is_running() {
        qmp.execute("system_powerdown", json!({})).map_err(|error| failed(&error))?;
    }
    let mut still = None;
    loop {
        match RunState::of(&mut qmp) {
            Ok(state) if state.is_off() => return Ok(true),
            Ok(_) if Instant::now() > deadline => return Ok(false),
            Ok(state) if state.is_running() || state.word() == "suspended" => still = None,
            // It may be held for a moment only, to be saved say.
            Ok(_) if still.get_or_insert_with(Instant::now).elapsed() > STANDS_STILL => {
                return Ok(false);
            }
            Ok(_) => {}
            // A QEMU that is ending closes its socket before it is gone.
            Err(_) => {
                let left = deadline.saturating_duration_since(Instant::now());
                return Ok(record.process.ends_within(left));
            }
        }
        if record.process.ends_within(LOOK) {
            return Ok(true);
        }
    }
}
