//! The pause: stop the guest, save its device state, look what was written last.
//!
//! Saving the device state might write to RAM, so the look comes after it. The set is looked at, not
//! taken: protecting its pages again would make the pause longer, and the next capture may find them
//! written.

use crate::step::CaptureStep;
use crate::workers::cores;
use dewar_guest::{Guest, GuestError};
use dewar_memory::{KernelError, WriteTracker};
use dewar_units::PageSet;
use std::time::{Duration, Instant};

/// A guest that stands still, and what has to be kept of it beside the pages captured before.
#[derive(Debug)]
pub struct Pause {
    /// What its devices are.
    pub device_state: Vec<u8>,
    /// The pages that were written since the last epoch.
    pub dirty: PageSet,
    began: Instant,
}

/// Stops a guest. Where that fails the caller puts it back ([`Guest::rollback`]).
///
/// # Errors
/// Where the guest or its tracker fails.
pub fn stop<E: From<GuestError> + From<KernelError>>(
    guest: &mut dyn Guest,
    tracker: &WriteTracker,
    reached: &dyn Fn(CaptureStep),
) -> Result<Pause, E> {
    guest.begin_pause()?;
    reached(CaptureStep::Stopping);
    let began = Instant::now();
    guest.stop()?;
    reached(CaptureStep::Stopped);
    let device_state = guest.save_state()?;
    reached(CaptureStep::StateSaved);
    let dirty = tracker.look(cores())?;
    Ok(Pause { device_state, dirty, began })
}

impl Pause {
    /// Lets the guest run again, its last pages being captured. Returns how long it stood still.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn resume(
        &self,
        guest: &mut dyn Guest,
        reached: &dyn Fn(CaptureStep),
    ) -> Result<Duration, GuestError> {
        reached(CaptureStep::Captured);
        guest.resume()?;
        let pause = self.began.elapsed();
        reached(CaptureStep::Resumed);
        Ok(pause)
    }
}
