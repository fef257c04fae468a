//! How a guest stands, in QEMU's words (`RunState` in its qapi/run-state.json), and what
//! can be done with one that stands so.

use crate::qmp::{Qmp, QmpError};
use serde_json::json;

pub(crate) const RUNNING: &str = "running";
/// What QEMU calls a guest that stands still since a disk of it could not be written.
pub(crate) const IO_ERROR: &str = "io-error";
/// Why a sleeping guest is left where it is.
pub(crate) const ASLEEP: &str = "it sleeps (ACPI S3), and could not be woken after; wake it first";

/// A run state of QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunState(String);

impl RunState {
    /// How a guest stands now.
    ///
    /// # Errors
    /// Where its QEMU does not answer.
    pub fn of(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let answer = qmp.execute("query-status", json!({}))?;
        Ok(Self(answer["status"].as_str().unwrap_or_default().to_owned()))
    }

    /// The state that a word of QEMU's names.
    pub fn named(word: &str) -> Self {
        Self(word.to_owned())
    }

    /// QEMU's word for it.
    pub fn word(&self) -> &str {
        &self.0
    }

    /// Whether its vCPUs run.
    pub fn is_running(&self) -> bool {
        self.0 == RUNNING
    }

    /// Whether it was powered off, and its QEMU stayed (`-no-shutdown`).
    pub fn is_off(&self) -> bool {
        self.0 == "shutdown"
    }

    /// Whether somebody holds it, and `cont` lets it run. After its state was saved, too.
    pub fn is_paused(&self) -> bool {
        ["paused", "prelaunch", "postmigrate", "finish-migrate"].contains(&self.word())
    }

    /// Why it does not run, as the end of a sentence that begins with the guest; nothing
    /// where it runs or is paused.
    pub fn why_not_running(&self) -> Option<&'static str> {
        Some(match self.word() {
            "shutdown" => "has powered off, and its QEMU stays (-no-shutdown)",
            "guest-panicked" => "has panicked",
            "internal-error" => "does not run: its QEMU met an internal error (KVM cannot run it?)",
            "suspended" => "sleeps (ACPI S3)",
            "watchdog" => "was stopped by its watchdog",
            IO_ERROR => "stands still: a disk of it could not be written",
            _ => return None,
        })
    }

    /// What its user can do about that.
    pub fn advice(&self) -> Option<&'static str> {
        Some(match self.word() {
            "shutdown" => "'dewar stop' ends its QEMU; QMP 'system_reset' and 'cont' boot it again",
            "guest-panicked" | "internal-error" | "watchdog" => {
                "QMP 'system_reset' and 'cont' boot it again"
            }
            "suspended" => "QMP 'system_wakeup' wakes it",
            IO_ERROR => "make room there, then let it run on (QMP 'cont')",
            _ => return None,
        })
    }
}

/// Whether the vCPUs run.
pub(crate) fn is_running(qmp: &mut Qmp) -> Result<bool, QmpError> {
    Ok(status(qmp)? == RUNNING)
}

/// QEMU's word for how the guest is (`RunState` in its qapi/run-state.json).
pub(crate) fn status(qmp: &mut Qmp) -> Result<String, QmpError> {
    let answer = qmp.execute("query-status", json!({}))?;
    Ok(answer["status"].as_str().unwrap_or_default().to_owned())
}

impl std::fmt::Display for RunState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.word() {
            "shutdown" => "off",
            "guest-panicked" => "panicked",
            // Its state was saved while it stood still.
            _ if self.is_paused() => "paused",
            word => word,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::RunState;

    #[test]
    fn each_state_is_told_and_only_a_paused_guest_can_be_let_run() {
        for (word, shown, paused) in [
            ("running", "running", false),
            ("postmigrate", "paused", true),
            ("paused", "paused", true),
            ("shutdown", "off", false),
            ("guest-panicked", "panicked", false),
            ("io-error", "io-error", false),
        ] {
            let state = RunState::named(word);
            assert_eq!((state.to_string().as_str(), state.is_paused()), (shown, paused), "{word}");
            assert_eq!(state.why_not_running().is_some(), !paused && word != "running", "{word}");
        }
    }
}
