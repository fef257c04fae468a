//! The scheduling of a controller and its watchdog.

use dewar_kernel::{Scheduling, Task};

/// The real-time priority of the controller: it must run when a job ends, before a
/// thread that it rescues.
const PRIORITY: u32 = 2;

/// Lets this process run whenever it has something to do; where that may not be it is slower.
pub fn go_ahead() {
    let own = std::process::id() as i32;
    let _ = Task { process: own, thread: own }.schedule(Scheduling::ahead(PRIORITY));
}
