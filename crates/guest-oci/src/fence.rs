//! A container that was given to another host stays here, and neither runs nor is heard, whatever becomes of the
//! processes that gave it.
//!
//! CRIU alone does not keep it so: when CRIU ends, it lets go what it held, and opens the network. So before the
//! container is given away its control group is frozen, which needs no process of ours, and its network is closed
//! by rules of our own. The next command takes both back, or ends the container in this state.

use crate::container::Container;
use crate::error::OciError;
use crate::network;
use crate::processes::Processes;
use crate::runtime::Status;
use dewar_kernel::{Pid, ProcessHandle};
use dewar_registry::ProcessId;
use std::time::{Duration, Instant};

/// How long killed processes may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(5);

impl Container {
    /// Freezes it, and closes its network. CRIU may hold it.
    ///
    /// # Errors
    /// Where it is not certain that it stands still and is silent.
    pub fn fence(&self, process: &ProcessId) -> Result<(), OciError> {
        self.runtime.pause(&self.id)?;
        network::close(process.pid)
    }

    /// Takes that back: it runs on, where CRIU does not hold it. One that was not fenced is left as it is.
    ///
    /// # Errors
    /// Where it stays frozen, or silent.
    pub fn lift_fence(&self, process: &ProcessId) -> Result<(), OciError> {
        if !process.is_alive() {
            return Ok(());
        }
        network::open(process.pid, false)?;
        match self.runtime.state_if_any(&self.id)? {
            Some(state) if state.status == Status::Paused => self.runtime.resume(&self.id),
            _ => Ok(()),
        }
    }

    /// Kills all of it where it is fenced: a frozen process dies of that before it runs again. The runtime would kill the
    /// first alone, and thaw all. CRIU may hold it: it ends when that lets it go.
    ///
    /// # Errors
    /// Where it is not known which its processes are.
    pub fn kill_fenced(&self, process: &ProcessId) -> Result<(), OciError> {
        if process.is_alive() {
            for pid in Processes::of(process.pid)?.pids() {
                if let Ok(handle) = ProcessHandle::open(Pid(pid)) {
                    let _ = handle.kill();
                }
            }
        }
        Ok(())
    }

    /// Removes it when all of it was killed. Its network stays closed.
    ///
    /// # Errors
    /// Where it does not end.
    pub fn remove_killed(&self, process: &ProcessId) -> Result<(), OciError> {
        // Where it is not frozen, or gone already, it refuses.
        let _ = self.runtime.resume(&self.id);
        let began = Instant::now();
        while process.is_alive() && began.elapsed() < ENDS_WITHIN {
            std::thread::sleep(LOOK);
        }
        self.runtime.delete(&self.id)
    }
}
