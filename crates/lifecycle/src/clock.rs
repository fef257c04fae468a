//! The clock of a guest that was brought back: it goes on from when the guest was saved.

use crate::text::foreign;
use dewar_guest_qemu::Agent;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Less than this is no worse than what clocks do anyway.
const WORTH_SETTING: Duration = Duration::from_secs(1);

/// How long its agent may take: the guest's memory may still be arriving.
const WITHIN: Duration = Duration::from_secs(5);

/// The time, in milliseconds since 1970.
pub fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.as_millis() as u64
}

/// How a guest's clock is.
#[derive(Debug)]
pub struct Clock {
    /// So far behind the host's.
    pub behind: Duration,
    /// Whether it was set, or why not.
    pub set: Result<(), String>,
}

/// Sets the clock of a guest that runs and was saved at a time, unless it is to be kept.
pub fn bring_forward(keep: bool, saved: SystemTime, line: &[String], folder: &Path) -> Clock {
    let behind = SystemTime::now().duration_since(saved).unwrap_or_default();
    let set = match keep {
        _ if behind < WORTH_SETTING => Ok(()),
        true => Err("it was to be kept".to_owned()),
        false => match Agent::of(line, folder, WITHIN) {
            None => Err("it has no guest agent that could set it".to_owned()),
            Some(agent) => agent
                .and_then(|mut agent| agent.set_time())
                .map_err(|error| foreign(&error.to_string())),
        },
    };
    Clock { behind, set }
}
