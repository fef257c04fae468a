//! What a QEMU has said of its guest unasked (events in QEMU's qapi/run-state.json).

use serde_json::Value;

/// What was heard since we connected.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// How often the vCPUs were let run.
    pub(crate) resumes: u64,
    /// Whether the guest powered itself off.
    pub(crate) shut_down: bool,
    /// How often QEMU has reset the guest.
    pub(crate) resets: u64,
    /// Why QEMU was about to end or to reset the guest, and nobody has asked yet.
    pub(crate) shutdown_reason: Option<String>,
}

impl Events {
    /// Notes what a message says, if it is an event.
    pub(crate) fn note(&mut self, message: &Value) {
        let data = &message["data"];
        match message["event"].as_str() {
            Some("RESUME") => self.resumes += 1,
            Some("RESET") => self.resets += 1,
            Some("GUEST_PANICKED") if data["action"] == "pause" => {
                self.shutdown_reason = Some("guest-panic".to_owned());
            }
            Some("SHUTDOWN") => {
                self.shut_down |= data["guest"] == true;
                let reason = data["reason"].as_str().unwrap_or_default();
                self.shutdown_reason = Some(reason.to_owned());
            }
            _ => {}
        }
    }
}
