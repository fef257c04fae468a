//! A guest on its way into a QEMU that waits for it: restored, thawed or upgraded.
//!
//! ```text
//!  waiting --memory is served, tracked or simply there--> --load--> loaded, stands still
//!                                                                     | commit: the record says
//!                                                                     v `running`
//!                                            runs <--let_run-- on record as running
//! ```
//!
//! **The record decides.** Until `commit` it says `restoring` or `frozen`: a command that finds it so
//! ends the QEMU, which never ran the guest, and starts over. From `commit` on the QEMU may have run the
//! guest and is never ended for that. `start_pending` in the record says that it is still to be let
//! run: whichever command finds it so does it ([`Incoming::resume`]). If QEMU refuses to run the guest,
//! it has not run, and the record goes back to what it said before.
//!
//! An upgrade uses the first half alone. There the old QEMU sends the state to the new one, and the new
//! one lets the guest run by itself: what is committed when is in [`crate::handover`].

use crate::discover::{map_ram_files, maps_file};
use crate::launch::kill;
use crate::machine::forwards::add as add_forwards;
use crate::qmp::{Qmp, QmpError};
use crate::run_state::RunState;
use crate::state::{self, Activation, StateError};
use crate::uffd_access::{close_userfaultfd_device, uffd_origin};
use dewar_guest::GuestError;
use dewar_kernel::Pid;
use dewar_memory::{ProcessHandle, Ram, UffdOrigin};
use dewar_registry::{Frozen, GuestFolder, GuestRecord, Kept, Phase, RegistryError};
use serde_json::json;
use std::path::PathBuf;

/// Why a guest does not come into its new QEMU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IncomingError {
    /// QEMU has its RAM elsewhere.
    #[error("QEMU did not take its RAM from {}", .0.display())]
    ForeignRam(PathBuf),
    /// QEMU does not run the guest.
    #[error("starting the guest: {0}")]
    NotStarted(#[source] QmpError),
    /// QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The guest's folder.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// A guest that is loaded and on record as one that may run.
#[derive(Debug)]
pub struct Committed {
    /// How it stands.
    pub state: RunState,
    /// What QEMU said against ports that it forwarded.
    pub unforwarded: Vec<String>,
}

/// A guest on its way into a QEMU. Dropped, it changes nothing.
#[derive(Debug)]
pub struct Incoming {
    folder: GuestFolder,
    record: GuestRecord,
    qmp: Qmp,
    /// What the record says again if QEMU refuses to run the guest.
    if_refused: Phase,
}

impl Incoming {
    /// A guest of which nothing is loaded yet. `record` names the QEMU that waits.
    pub fn new(folder: GuestFolder, record: GuestRecord, qmp: Qmp) -> Self {
        let if_refused = record.phase;
        Self { folder, record, qmp, if_refused }
    }

    /// A guest that a dead command committed and may not have let run.
    ///
    /// # Errors
    /// Where its QEMU does not answer.
    pub fn resume(folder: GuestFolder, record: GuestRecord) -> Result<Self, QmpError> {
        let qmp = Qmp::of(&record)?;
        let if_refused = match is_frozen_in_place(&record) {
            true => Phase::Frozen,
            // One that another host gave away is to be let run by the next command, too.
            false if record.migration.is_some() => Phase::Arriving,
            false => Phase::Running,
        };
        Ok(Self { folder, record, qmp, if_refused })
    }

    /// The guest's record, as it is on disk but for what is under way.
    pub fn record(&self) -> &GuestRecord {
        &self.record
    }

    /// The same, to note more in it; the next save writes it.
    pub fn record_mut(&mut self) -> &mut GuestRecord {
        &mut self.record
    }

    /// The connection to its QEMU.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// Gives the connection up.
    pub fn into_qmp(self) -> Qmp {
        self.qmp
    }

    /// Writes its record.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn save(&self) -> Result<(), RegistryError> {
        self.folder.set_record(&self.record)
    }

    /// That QEMU has the guest's RAM mapped from its files.
    ///
    /// # Errors
    /// [`IncomingError::ForeignRam`] with the first file that it does not map.
    pub fn require_ram(&self) -> Result<(), IncomingError> {
        let foreign = |path: &&PathBuf| !maps_file(self.record.process.pid, path);
        match self.record.ram.iter().map(|file| &file.path).find(foreign) {
            Some(path) => Err(IncomingError::ForeignRam(path.clone())),
            None => Ok(()),
        }
    }

    /// The QEMU's process, and how it may make a userfaultfd: to be taken back with
    /// [`Incoming::close_uffd_device`] when one is made.
    ///
    /// # Errors
    /// Where the process is gone, or cannot be given the right to.
    pub fn uffd_origin(&mut self) -> Result<(ProcessHandle, UffdOrigin), GuestError> {
        let process = ProcessHandle::open(Pid(self.record.process.pid))?;
        let origin = uffd_origin(&mut self.qmp, &process).map_err(|error| {
            GuestError::failed("handing over /dev/userfaultfd", &self.record.name, error)
        })?;
        Ok((process, origin))
    }

    /// Takes `/dev/userfaultfd` away from QEMU again, where it was given that.
    pub fn close_uffd_device(&mut self) {
        close_userfaultfd_device(&mut self.qmp);
    }

    /// The process, its RAM as it has it mapped, and how it may make a userfaultfd.
    ///
    /// # Errors
    /// As [`Incoming::uffd_origin`], or where its RAM is not mapped as it should be.
    pub fn memory(&mut self) -> Result<(ProcessHandle, Ram, UffdOrigin), GuestError> {
        let ram = map_ram_files(&self.record.name, self.record.process.pid, &self.record.ram)?;
        let (process, origin) = self.uffd_origin()?;
        Ok((process, ram, origin))
    }

    /// Loads the state of its devices; the guest stays paused.
    ///
    /// # Errors
    /// Where QEMU refuses the state.
    pub fn load(&mut self, state: Vec<u8>) -> Result<(), StateError> {
        state::load(&mut self.qmp, state, Activation::Now)
    }

    /// The same for a guest that is another host's still: its disks are left to that host until it is
    /// let run here.
    ///
    /// # Errors
    /// Where QEMU refuses the state.
    pub fn load_to_be_given(&mut self, state: Vec<u8>) -> Result<(), StateError> {
        state::load(&mut self.qmp, state, Activation::WhenItRuns)
    }

    /// Notes that the guest is loaded and may run from now on. The ports that a frozen guest forwarded
    /// are forwarded again before that. A guest that is off, say, stays as it is: nothing is to let it
    /// run.
    ///
    /// # Errors
    /// Where QEMU does not answer or the record cannot be written; nothing is noted then.
    pub fn commit(&mut self) -> Result<Committed, IncomingError> {
        let ports = self.record.frozen.as_ref().and_then(|frozen| frozen.forwards.as_ref());
        let unforwarded = ports.map_or_else(Vec::new, |ports| {
            add_forwards(&mut self.qmp, ports)
                .unwrap_or_else(|error| vec![format!("forwarded ports: {error}")])
        });
        let state = RunState::of(&mut self.qmp)?;
        let record = &mut self.record;
        record.start_pending &= state.is_paused();
        record.phase = Phase::Running;
        // Until it runs, one that is frozen in place can be that again: its QEMU may die before.
        if !(record.start_pending && is_frozen_in_place(record)) {
            record.frozen = None;
        }
        self.save()?;
        Ok(Committed { state, unforwarded })
    }

    /// Lets the guest run, if it is to; says whether it was let run. `step` is told so, before it is
    /// noted.
    ///
    /// # Errors
    /// Where it does not. If QEMU refused, the record says again what it said before, and a guest
    /// that is frozen has no process any more.
    pub fn let_run(&mut self, step: &dyn Fn(&str)) -> Result<bool, IncomingError> {
        if !self.record.start_pending {
            return Ok(false);
        }
        if let Err(error) = self.qmp.execute("cont", json!({})) {
            if let QmpError::Refused { .. } = error {
                self.take_back()?;
            }
            return Err(IncomingError::NotStarted(error));
        }
        step("let run");
        self.record.start_pending = false;
        self.record.frozen = None;
        // It runs; where this cannot be written, the next command sees that and notes it.
        let _ = self.save();
        Ok(true)
    }

    /// Notes that it has not run, and will not; one that was given to this host may yet.
    fn take_back(&mut self) -> Result<(), RegistryError> {
        if self.if_refused == Phase::Arriving {
            return Ok(());
        }
        self.record.phase = self.if_refused;
        match self.if_refused {
            Phase::Frozen => drop(kill(&self.record.process)),
            _ => self.record.frozen = None,
        }
        self.record.start_pending = false;
        self.save()
    }
}

/// Whether what a guest is made from again lies where its RAM is.
fn is_frozen_in_place(record: &GuestRecord) -> bool {
    matches!(&record.frozen, Some(Frozen { kept: Kept::InPlace { .. }, .. }))
}
