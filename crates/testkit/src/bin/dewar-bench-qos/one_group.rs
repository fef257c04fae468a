//! All threads in one group of the scheduler, as long as a bench lasts.
//!
//! With `kernel.sched_autogroup_enabled` each session is a group (sched(7)). A QEMU in a
//! session of its own then has as much as all hogs of another one together, and a nice value
//! counts within its session only: what would be compared are sessions.

use anyhow::{Context, Result};
use std::fs;

const SETTING: &str = "/proc/sys/kernel/sched_autogroup_enabled";

/// Holds the setting off; as it was when dropped.
pub struct OneGroup {
    was_on: bool,
}

impl OneGroup {
    /// # Errors
    /// Where the setting may not be changed.
    pub fn hold() -> Result<Self> {
        let was_on = fs::read_to_string(SETTING).is_ok_and(|it| it.trim() == "1");
        if was_on {
            fs::write(SETTING, "0").with_context(|| format!("cannot set {SETTING}"))?;
        }
        Ok(Self { was_on })
    }
}

impl Drop for OneGroup {
    fn drop(&mut self) {
        if self.was_on {
            let _ = fs::write(SETTING, "1");
        }
    }
}
