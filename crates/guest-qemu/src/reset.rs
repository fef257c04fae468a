//! A guest that is stopped at its reset and gets empty memory there.
//!
//! Dewar has QEMU stop at a reset in place of doing it (`set-action reboot=shutdown,shutdown=pause`). The guest
//! stands still, with its memory as it was. The supervisor puts an empty file in the place of each RAM file,
//! and keeps the old one:
//!
//! ```text
//!   held      QEMU said SHUTDOWN, and stands still
//!   made      NAME.next: as large, and empty but for what the firmware left below 1 MiB
//!   mapped    QEMU has it in place of NAME: mmap(MAP_FIXED) and dup3, by injection (its descriptor came by `getfd`)
//!   renamed   NAME.next is NAME; the old file has no name any more
//!   reset     reboot=reset, system_reset: it stands still, in state "prelaunch"
//!   runs      cont
//! ```
//!
//! **If the supervisor dies.** Before "mapped" no process uses NAME.next, and the next supervisor removes it.
//! From "mapped" on it is the guest's memory, and the next supervisor gives it its name ([`settle`]). Then it
//! resets the guest. A guest that is held is known by QEMU's state "shutdown". A guest that was reset and not
//! started is in "prelaunch"; the supervisor's note on disk says that it is to run.
//!
//! **Without injection** (huge pages of a pool, a kernel that refuses it) the supervisor copies the memory while
//! the guest is held. That takes longer.
//!
//! **Below 1 MiB** the new file gets a copy of the old content. There lies the firmware, which QEMU puts there
//! once, when it makes the machine; without it a q35 machine does not boot. Each RAM file gets the copy, since
//! only QEMU knows which of them holds the guest's address 0.

mod error;
mod memory;

pub use error::ResetError;
pub use memory::{MemoryAside, settle};

use crate::qmp::{Qmp, QmpError};
use crate::run_state::RunState;
use crate::state::is_migrating;
use dewar_registry::{GuestRecord, ProcessId};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long QEMU may take to reset the machine.
const RESETS_WITHIN: Duration = Duration::from_secs(10);

/// What a QEMU was about to do when it stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// To reset its guest.
    Reset,
    /// To end: the guest powered off or panicked, or somebody ended QEMU.
    Off,
}

/// A monitor on which a QEMU tells of resets. Nobody else uses it.
#[derive(Debug)]
pub struct ResetMonitor {
    qmp: Qmp,
}

impl ResetMonitor {
    /// Connects to the monitor behind `socket`, of this very process.
    ///
    /// # Errors
    /// Where it does not answer.
    pub fn connect(socket: &Path, process: &ProcessId) -> Result<Self, QmpError> {
        Ok(Self { qmp: Qmp::connect_to(socket, process)? })
    }

    /// Has QEMU stop at the next reset.
    ///
    /// # Errors
    /// Where it does not.
    pub fn hold_next(&mut self) -> Result<(), QmpError> {
        let actions = json!({"reboot": "shutdown", "shutdown": "pause"});
        self.qmp.execute("set-action", actions).map(drop)
    }

    /// Has it do resets itself again, and end when the guest powers off.
    ///
    /// # Errors
    /// Where it does not.
    pub fn hold_none(&mut self) -> Result<(), QmpError> {
        let actions = json!({"reboot": "reset", "shutdown": "poweroff"});
        self.qmp.execute("set-action", actions).map(drop)
    }

    /// Waits for QEMU to stop its guest.
    ///
    /// # Errors
    /// [`QmpError::Closed`] where it has ended.
    pub fn stopped_within(&mut self, time: Duration) -> Result<Option<Stopped>, QmpError> {
        let reason = self.qmp.shutdown_within(time)?;
        Ok(reason.map(|reason| match reason.as_str() {
            "guest-reset" | "host-qmp-system-reset" | "subsystem-reset" => Stopped::Reset,
            _ => Stopped::Off,
        }))
    }

    /// How the guest stands.
    ///
    /// # Errors
    /// Where QEMU does not answer.
    pub fn state(&mut self) -> Result<RunState, QmpError> {
        RunState::of(&mut self.qmp)
    }

    /// Whether QEMU saves or moves the guest just now.
    ///
    /// # Errors
    /// Where it does not answer.
    pub fn is_migrating(&mut self) -> Result<bool, QmpError> {
        is_migrating(&mut self.qmp)
    }

    /// Resets a guest that stands still; it stays so.
    ///
    /// # Errors
    /// Where QEMU does not.
    pub fn reset(&mut self) -> Result<(), QmpError> {
        self.hold_none()?;
        self.qmp.execute("system_reset", json!({})).map(drop)
    }

    /// Lets a guest run that was reset.
    ///
    /// # Errors
    /// Where QEMU does not.
    pub fn let_run(&mut self) -> Result<(), QmpError> {
        let deadline = Instant::now() + RESETS_WITHIN;
        loop {
            match self.state()?.word() {
                "prelaunch" => return self.qmp.execute("cont", json!({})).map(drop),
                // It answers before it has reset the machine.
                "shutdown" if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_micros(500));
                }
                // Somebody else has it in hand.
                _ => return Ok(()),
            }
        }
    }

    /// Has QEMU end, as it would have by itself.
    ///
    /// # Errors
    /// Where it does not answer.
    pub fn quit(&mut self) -> Result<(), QmpError> {
        match self.qmp.execute("quit", json!({})) {
            Err(QmpError::Closed) => Ok(()),
            result => result.map(drop),
        }
    }

    /// Gives a guest that is held empty memory, or, with `may_copy`, a copy of it to us where that cannot be. Returns what it
    /// had. `reached` hears of each step.
    ///
    /// # Errors
    /// Where neither can be. What was not exchanged is as it was.
    pub fn set_memory_aside(
        &mut self,
        record: &GuestRecord,
        may_copy: bool,
        reached: &dyn Fn(&str),
    ) -> Result<MemoryAside, ResetError> {
        memory::set_aside(&mut self.qmp, record, may_copy, reached)
    }
}
