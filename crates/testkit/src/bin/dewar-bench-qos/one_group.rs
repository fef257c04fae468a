//! All threads in one group of the scheduler, as long as a bench lasts.
//!
//! With `kernel.sched_autogroup_enabled` each session is a group (sched(7)). A QEMU in a
//! session of its own then has as much as all hogs of another one together, and a nice value
//! counts within its session only: what would be compared are sessions.

use std::fs;

const SETTING: &str = "/proc/sys/kernel/sched_autogroup_enabled";

/// Holds the setting off; as it was when dropped.
pub struct OneGroup {
    was_on: bool,
}

impl OneGroup {
    /// Turns it off, or says that it stays on.
    pub fn hold() -> Self {
        let was_on = fs::read_to_string(SETTING).is_ok_and(|it| it.trim() == "1");
        if was_on {
            match fs::write(SETTING, "0") {
                Ok(()) => println!("{SETTING} was 1, and is 0 until the end"),
                Err(error) => println!("{SETTING} is 1, and stays so: {error}"),
            }
        }
        Self { was_on }
    }
}

impl Drop for OneGroup {
    fn drop(&mut self) {
        if self.was_on {
            let _ = fs::write(SETTING, "1");
        }
    }
}
