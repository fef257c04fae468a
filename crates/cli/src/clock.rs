//! The clock of a guest that was brought back: it goes on from when the guest was saved.

use crate::args::ClockChoice;
use crate::output::foreign;
use dewar_guest_qemu::Agent;
use dewar_units::format_duration;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Less than this is no worse than what clocks do anyway.
const WORTH_SETTING: Duration = Duration::from_secs(1);

/// How long its agent may take: the guest's memory may still be arriving.
const WITHIN: Duration = Duration::from_secs(5);

/// How a guest's clock is.
pub struct Clock {
    behind: Duration,
    /// Whether it was set, or why not.
    set: Result<(), String>,
}

/// Sets the clock of a guest that runs and was saved at a time, where that is wanted.
pub fn bring_forward(
    choice: ClockChoice,
    saved: SystemTime,
    line: &[String],
    folder: &Path,
) -> Clock {
    let behind = SystemTime::now().duration_since(saved).unwrap_or_default();
    let set = match choice {
        _ if behind < WORTH_SETTING => Ok(()),
        ClockChoice::Keep => Err("it was to be kept".to_owned()),
        ClockChoice::Step => match Agent::of(line, folder, WITHIN) {
            None => Err("it has no guest agent that could set it".to_owned()),
            Some(agent) => agent
                .and_then(|mut agent| agent.set_time())
                .map_err(|error| foreign(&error.to_string())),
        },
    };
    Clock { behind, set }
}

impl Clock {
    /// For programs.
    pub fn told(&self) -> Value {
        json!({
            "behind_ms": self.behind.as_millis() as u64, "set": self.set.is_ok(),
            "why_not": self.set.as_ref().err(),
        })
    }

    /// For people: a line, where there is something to tell.
    pub fn line(&self) -> String {
        match &self.set {
            Ok(()) => String::new(),
            Err(why) => {
                format!("\nits clock is {} behind: {why}", format_duration(self.behind))
            }
        }
    }
}
