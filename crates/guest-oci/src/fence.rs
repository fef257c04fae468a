//! A container that was given to another host stays here, and neither runs nor is heard, whatever becomes of the
//! processes that gave it.
//!
//! CRIU alone does not keep it so: when CRIU ends, it lets go what it held, and opens the network. So before the
//! container is given away its control group is frozen, which needs no process of ours, and its network is closed
//! by rules of our own. The next command takes both back, or ends the container in this state.

use crate::container::Container;
use crate::error::OciError;
use crate::network::{HeldNetwork, Network, Openings};
use crate::processes::Processes;
use crate::runtime::Status;
use crate::strays::Strays;
use dewar_kernel::{Pid, ProcessHandle};
use dewar_registry::ProcessId;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// How long killed processes may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(5);

/// What a fence changes, so that it can be taken back. Kept before the fence is made, and as long as it is there.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fence {
    openings: Openings,
}

impl Container {
    /// What a fence of it would change.
    ///
    /// # Errors
    /// Where its network cannot be looked at.
    pub fn plan_fence(&self, process: &ProcessId) -> Result<Fence, OciError> {
        Ok(Fence { openings: Network::of(process.pid).openings()? })
    }

    /// Freezes it. CRIU may hold it. What does that is one of `strays`.
    ///
    /// # Errors
    /// Where it is not frozen by this: its user may have done that.
    pub fn freeze(&self, strays: &Strays) -> Result<(), OciError> {
        self.runtime.pause(&self.id, strays)
    }

    /// Closes its network.
    ///
    /// # Errors
    /// Where it is not certain that it is silent.
    pub fn silence(
        &self,
        process: &ProcessId,
        fence: &Fence,
        strays: &Strays,
    ) -> Result<(), OciError> {
        Network::of(process.pid).marked(strays.variable()).close(&fence.openings)
    }

    /// Whether its network was there before it. Another one CRIU saves with it, as it is then.
    ///
    /// # Errors
    /// Where its configuration cannot be read.
    pub fn has_named_network(&self) -> Result<bool, OciError> {
        Ok(Network::named(&self.config()?).is_some())
    }

    /// Opens its network again; that it is frozen is left alone.
    ///
    /// # Errors
    /// Where it stays closed.
    pub fn unsilence(&self, process: &ProcessId, fence: &Fence) -> Result<(), OciError> {
        if !process.is_alive() {
            // What was closed is there for the next that is started in it, but after a restart of the host.
            let named = self.config().ok().and_then(|it| Network::named(&it));
            return match named.filter(|_| process.is_of_this_boot()) {
                Some(network) => network.open(&fence.openings),
                None => Ok(()),
            };
        }
        Network::of(process.pid).open(&fence.openings)
    }

    /// That the fence is there.
    ///
    /// # Errors
    /// Where somebody let it run.
    pub fn require_fenced(&self) -> Result<(), OciError> {
        match self.runtime.state(&self.id)?.status {
            Status::Paused => Ok(()),
            _ => Err(OciError::RanOn { id: self.id.clone() }),
        }
    }

    /// Takes a fence back: it runs on, where CRIU does not hold it.
    ///
    /// # Errors
    /// Where it stays frozen, or silent.
    pub fn lift_fence(&self, process: &ProcessId, fence: &Fence) -> Result<(), OciError> {
        let opened = self.unsilence(process, fence);
        if !process.is_alive() {
            return opened;
        }
        match self.runtime.state_if_any(&self.id)? {
            Some(state) if state.status == Status::Paused && state.pid == process.pid => {
                self.runtime.resume(&self.id).and(opened)
            }
            _ => opened,
        }
    }

    /// Ends it where it is fenced: nothing of it runs again, and its connections are not closed, but forgotten. Its
    /// network stays closed. A CRIU that holds it is one of `strays`. Another container that has its id by now is
    /// left alone.
    ///
    /// # Errors
    /// Where it does not end.
    pub fn end_fenced(&self, process: &ProcessId, strays: &Strays) -> Result<(), OciError> {
        // By its path, where it has one: the process may be dead already.
        let named = self.config().ok().and_then(|it| Network::named(&it));
        let held = HeldNetwork::of(process.pid).filter(|_| process.is_alive());
        if process.is_alive() {
            let processes = Processes::of(process.pid)?;
            let tracers = processes.tracers();
            // A frozen process dies of it before it runs. The runtime would kill the first alone, and thaw all.
            kill(processes.pids());
            // CRIU, who holds them: killed, it has no time to make connections that it has taken apart work again.
            kill(tracers.into_iter().filter(|pid| *pid != 0));
        }
        strays.kill();
        strays.end_all();
        if self.is_here(process)? {
            // Where it is not frozen the runtime refuses.
            let _ = self.runtime.resume(&self.id);
        }
        let began = Instant::now();
        while process.is_alive() && began.elapsed() < ENDS_WITHIN {
            std::thread::sleep(LOOK);
        }
        self.forget(process)?;
        if let Some(network) = named.as_ref().or(held.as_deref()) {
            network.unlock();
            network.forget_connections();
        }
        Ok(())
    }

    /// Whether what the runtime has by its id is the container with this first process.
    ///
    /// # Errors
    /// Where the runtime does not tell.
    pub fn is_here(&self, process: &ProcessId) -> Result<bool, OciError> {
        let state = self.runtime.state_if_any(&self.id)?;
        let is_known = state.is_some_and(|it| it.pid == process.pid);
        Ok(is_known && process.is_alive())
    }

    /// Has the runtime, and podman, forget the container with this first process, dead or alive. Another is left alone.
    ///
    /// # Errors
    /// Where it does not end.
    pub fn forget(&self, process: &ProcessId) -> Result<(), OciError> {
        match self.state_if_any()? {
            Some(state) if state.pid == process.pid || state.status == Status::Stopped => {
                self.delete()
            }
            _ => Ok(()),
        }
    }
}

fn kill(pids: impl Iterator<Item = i32>) {
    for pid in pids {
        if let Ok(handle) = ProcessHandle::open(Pid(pid)) {
            let _ = handle.kill();
        }
    }
}
