//! A running QEMU as a [`Guest`].

mod journal_cache;
mod machine;
mod preconditions;

use crate::bitmaps;
use crate::discover::{Discovered, Disk, discover};
use crate::disks;
use crate::journal::{Current, Journal, JournaledDisk};
use crate::qmp::{Qmp, QmpError};
use crate::rollback::{self, END_WITHIN, put_back_offline, rollback};
use crate::run_state::{IO_ERROR, RunState, is_running};
use crate::state::StateChannel;
use crate::uffd_access::{close_userfaultfd_device, uffd_origin};
use dewar_guest::{DiskCopy, DiskInfo, DiskPlace, DiskTracking, Guest, GuestError, Health};
use dewar_kernel::Pid;
use dewar_memory::{ProcessHandle, Ram, UffdOrigin};
use dewar_registry::{GuestFolder, GuestRecord};
use serde_json::json;
use std::error::Error;
use std::fs;
use std::sync::Arc;

/// What became of what was to stand still.
const RAN: &str = "somebody let it run while it was to stand still";
const TAKING_HOLD: &str = "taking hold";

/// A QEMU that a command works on. Its folder must be locked.
#[derive(Debug)]
pub struct QemuGuest {
    pub(crate) folder: GuestFolder,
    pub(crate) record: GuestRecord,
    pub(crate) process: ProcessHandle,
    pub(crate) qmp: Qmp,
    pub(crate) found: Discovered,
    channel: Option<StateChannel>,
    /// How often it had been let run when we stopped it.
    resumes: u64,
    tracking: Option<DiskTracking>,
    /// Its command line when [`QemuGuest::machine`] looked.
    line: Option<Vec<String>>,
    /// Of which disks it is known what was written since the earlier pause.
    tracked: Vec<bool>,
    /// Whether it ran when it was prepared.
    ran: bool,
    /// What is to be undone, as long as anything is: its file may be taken from us.
    noted: Option<Journal>,
    /// Disks that are left out of a checkpoint.
    excluded: Vec<Disk>,
}

impl QemuGuest {
    /// Takes hold of a guest, after finishing what an earlier command left
    /// under way.
    ///
    /// # Errors
    /// [`GuestError::Unsupported`] with all reasons where it cannot be handled.
    pub fn attach(folder: GuestFolder, record: GuestRecord) -> Result<Self, GuestError> {
        let name = record.name.clone();
        let process = ProcessHandle::open(Pid(record.process.pid))?;
        if !record.process.is_alive() {
            let guest = record.name.clone();
            return Err(GuestError::Ended { guest, operation: "it was not looked at".to_owned() });
        }
        let mut qmp =
            Qmp::of(&record).map_err(|error| GuestError::failed(TAKING_HOLD, &name, error))?;
        rollback(&mut qmp, &folder)
            .map_err(|error| GuestError::failed(TAKING_HOLD, &name, error))?;
        let found = discover(&mut qmp, &record)?;
        Ok(Self {
            folder,
            record,
            process,
            qmp,
            found,
            channel: None,
            resumes: 0,
            tracking: None,
            line: None,
            tracked: Vec::new(),
            ran: false,
            noted: None,
            excluded: Vec::new(),
        })
    }

    /// What Dewar knows of it.
    pub fn record(&self) -> &GuestRecord {
        &self.record
    }

    /// What it is made of.
    pub fn found(&self) -> &Discovered {
        &self.found
    }

    /// The QMP connection, to share with a guardian.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// The threads that run its vCPUs.
    ///
    /// # Errors
    /// Where QEMU does not answer.
    pub fn vcpu_threads(&mut self) -> Result<Vec<i32>, GuestError> {
        self.step("asking for its vCPUs", |qmp, _, _| qmp.vcpu_threads())
    }

    fn unsupported(&self, reason: String) -> GuestError {
        GuestError::Unsupported { guest: self.record.name.clone(), reasons: vec![reason] }
    }

    /// Stops the guest for good: checkpoints leave it so. [`Guest::rollback`] lets
    /// it run, if it ran, in any process.
    ///
    /// # Errors
    /// Where it does not stop.
    pub fn hold_still(&mut self) -> Result<(), GuestError> {
        self.flush()?;
        let held = self.step("stopping", |qmp, _, _| is_running(qmp))?;
        self.note(Journal { held, ..Journal::default() })?;
        self.stop()
    }

    /// Takes `/dev/userfaultfd` away from QEMU again, where it was given that.
    pub fn close_uffd_device(&mut self) {
        close_userfaultfd_device(&mut self.qmp);
    }

    pub(crate) fn failed(
        &self,
        operation: &str,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> GuestError {
        if self.process.has_ended() {
            let guest = self.record.name.clone();
            return GuestError::Ended { guest, operation: operation.to_owned() };
        }
        GuestError::failed(operation, &self.record.name, cause)
    }

    /// Runs `step` on the parts that it needs, and names the operation in its
    /// error.
    fn step<T, E: Into<Box<dyn Error + Send + Sync>>>(
        &mut self,
        operation: &str,
        step: impl FnOnce(&mut Qmp, &Discovered, &GuestFolder) -> Result<T, E>,
    ) -> Result<T, GuestError> {
        step(&mut self.qmp, &self.found, &self.folder)
            .map_err(|error| self.failed(operation, error))
    }

    /// Whether it runs now, whatever is under way with it.
    ///
    /// # Errors
    /// Where it does not answer.
    pub fn is_running(&mut self) -> Result<bool, GuestError> {
        self.step("asking whether it runs", |qmp, _, _| is_running(qmp))
    }

    /// That a guest that was stopped has stood still since: its state was saved. One whose
    /// process has ended has.
    ///
    /// # Errors
    /// Where somebody let it run, or it does not answer.
    pub fn ensure_stopped(&mut self) -> Result<(), GuestError> {
        let resumes = self.resumes;
        let ran = self.step("freezing", |qmp, _, _| has_run(qmp, resumes));
        match ran {
            Ok(true) => Err(self.failed("freezing", RAN)),
            Err(_) if self.process.ends_within(END_WITHIN) => Ok(()),
            other => other.map(drop),
        }
    }

    /// How a guest is whose process has ended.
    fn gone(&mut self) -> Health {
        if self.qmp.has_shut_down() { Health::ShutDown } else { Health::Gone }
    }

    fn plan_journal(&mut self) -> Result<Journal, GuestError> {
        let cwd = self.record.folder.clone();
        self.step("looking at the settings", |qmp, found, folder| {
            let settings = rollback::journal_of(qmp, false)?;
            let was_running = settings.was_running;
            let held = Journal::load(folder).ok().flatten().is_some_and(|journal| journal.held);
            // A guest that stands still needs no overlays: nobody writes.
            let disks = if was_running { &found.disks[..] } else { &[] };
            Ok::<_, crate::qmp::QmpError>(Journal {
                held,
                disks: disks
                    .iter()
                    .enumerate()
                    .map(|(index, disk)| JournaledDisk {
                        node: disk.node.clone(),
                        top: (disk.top != disk.node).then(|| disk.top.clone()),
                        overlay: disks::overlay_path(disk, index, &cwd, folder),
                        current: Current::Overlay,
                        kept: None,
                    })
                    .collect(),
                ..settings
            })
        })
    }
}

/// Whether a guest runs, or did, since QEMU had let it run so often.
fn has_run(qmp: &mut Qmp, resumes: u64) -> Result<bool, QmpError> {
    // Asked first: by its answer QEMU has told of all that happened.
    Ok(is_running(qmp)? || qmp.resumes() != resumes)
}

impl Guest for QemuGuest {
    fn name(&self) -> &str {
        &self.record.name
    }

    fn process(&self) -> &ProcessHandle {
        &self.process
    }

    fn ram(&self) -> Arc<Ram> {
        self.found.ram.clone()
    }

    fn uffd_origin(&mut self) -> Result<UffdOrigin, GuestError> {
        uffd_origin(&mut self.qmp, &self.process)
            .map_err(|error| self.failed("handing over /dev/userfaultfd", error))
    }

    fn prepare(&mut self, tracking: DiskTracking) -> Result<(), GuestError> {
        self.refuse_what_cannot_be_saved()?;
        let journal = self.plan_journal()?;
        self.ran = journal.was_running;
        self.refuse_existing_overlays(&journal)?;
        self.note(journal.clone())?;
        let cwd = self.record.folder.clone();
        let overlays = journal.disks.len();
        for index in 0..overlays {
            let overlay = journal.disks[index].overlay.clone();
            self.step("adding an overlay", |qmp, found, _| {
                disks::prepare(qmp, &found.disks[index], index, &overlay, &cwd)
            })?;
        }
        let since = tracking.since.as_deref();
        self.tracked = self.step("looking at dirty bitmaps", |qmp, found, _| {
            let keep = |disk: &crate::Disk| bitmaps::keep_only(qmp, &disk.node, since);
            found.disks.iter().map(keep).collect::<Result<_, _>>()
        })?;
        self.tracking = Some(tracking);
        Ok(())
    }

    fn begin_pause(&mut self) -> Result<(), GuestError> {
        self.refuse_what_cannot_be_saved()?;
        // Its user may have set them otherwise since.
        let settings =
            self.step("looking at the settings", |qmp, _, _| rollback::journal_of(qmp, false))?;
        let Journal { capabilities, tls_creds, bandwidth, .. } = settings;
        let before = self.journal()?;
        let journal = Journal { stopping: true, capabilities, tls_creds, bandwidth, ..before };
        self.refuse_another_status(&journal)?;
        self.refuse_other_disks()?;
        self.note(journal.clone())?;
        // Not sooner: a migration or a snapshot that its user begins would be without RAM.
        self.channel = Some(self.step("preparing the device state", |qmp, _, _| {
            rollback::change_settings(qmp, &journal)?;
            StateChannel::open(qmp)
        })?);
        Ok(())
    }

    fn drain(&mut self) -> Result<(), GuestError> {
        // An empty transaction waits for all I/O in flight (qmp_transaction in
        // QEMU's blockdev.c), without flushing disks as `stop` does.
        self.step("draining I/O", |qmp, _, _| {
            qmp.execute("transaction", json!({"actions": []})).map(drop)
        })
    }

    fn flush(&mut self) -> Result<(), GuestError> {
        for disk in &self.found.disks {
            let path = self.record.folder.join(&disk.file);
            if let Ok(file) = fs::File::open(path) {
                file.sync_data().map_err(|error| self.failed("flushing a disk", error))?;
            }
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), GuestError> {
        self.step("stopping", |qmp, _, _| qmp.execute("stop", json!({})).map(drop))?;
        self.resumes = self.qmp.resumes();
        self.refuse_reset_under_way()
    }

    fn save_state(&mut self) -> Result<Vec<u8>, GuestError> {
        let journal = self.journal()?;
        let channel = self.channel.take();
        let begin = self.tracking.as_ref().map(|it| it.begin.clone()).unwrap_or_default();
        self.step("saving the device state", |qmp, _, _| {
            let actions = disks::snapshot_actions(&journal, &begin);
            qmp.execute("transaction", json!({"actions": actions}))?;
            let channel = channel.map_or_else(|| StateChannel::open(qmp), Ok)?;
            channel.save(qmp)
        })
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        let journal = self.journal()?;
        let resumes = self.resumes;
        let disturbed = self.step("resuming", |qmp, _, _| {
            let disturbed = has_run(qmp, resumes)?;
            if !journal.held {
                rollback::resume(qmp, &journal)?;
            }
            Ok::<_, crate::qmp::QmpError>(disturbed)
        })?;
        match disturbed {
            true => Err(self.failed("capturing", RAN)),
            false => Ok(()),
        }
    }

    fn copy_disks(
        &mut self,
        place: &mut dyn FnMut(usize, &DiskInfo, bool) -> Result<DiskPlace, GuestError>,
    ) -> Result<Vec<DiskCopy>, GuestError> {
        let journal = self.note_frozen_files()?;
        let cwd = self.record.folder.clone();
        let mut copies = Vec::new();
        for (index, disk) in self.found.disks.clone().iter().enumerate() {
            let tracked = journal.was_running && self.tracked.get(index) == Some(&true);
            let target = place(index, &disk.info, tracked)?;
            let since = self.tracking.as_ref().and_then(|it| it.since.clone());
            self.step("copying a disk", |qmp, _, _| {
                if journal.was_running {
                    disks::copy(qmp, disk, index, &target, since.as_deref())
                } else {
                    disks::copy_offline(disk, &target.path, &cwd)
                }
            })?;
            let resumes = self.resumes;
            if !journal.was_running
                && self.step("looking at it", |qmp, _, _| has_run(qmp, resumes))?
            {
                return Err(self.failed("copying a disk", RAN));
            }
            copies.push(DiskCopy {
                disk: disk.info.clone(),
                path: target.path,
                format: "qcow2".to_owned(),
            });
        }
        Ok(copies)
    }

    fn finish(&mut self) -> Result<(), GuestError> {
        if !self.journal()?.held {
            self.rollback()?;
        }
        // Not sooner: it takes longer than the guest should wait, and disks had other nodes.
        self.refuse_another_machine()
    }

    fn rollback(&mut self) -> Result<(), GuestError> {
        self.channel = None;
        self.note_again()?;
        let mut result = self.step("putting it back", |qmp, _, folder| rollback(qmp, folder));
        // A QEMU that is ending closes its socket before it is gone.
        if result.is_err() && self.process.ends_within(END_WITHIN) {
            result = put_back_offline(&self.folder)
                .map_err(|error| self.failed("making its disks current", error));
        }
        if result.is_ok() {
            self.noted = None;
        }
        result
    }

    fn health(&mut self) -> Health {
        if self.process.has_ended() {
            return self.gone();
        }
        let status = RunState::of(&mut self.qmp);
        // A QEMU that is ending closes its socket before it is gone.
        if status.is_err() && self.process.ends_within(END_WITHIN) {
            return self.gone();
        }
        let journal = Journal::load(&self.folder);
        let is_under_way = journal.map(|found| found.is_some() || self.noted.is_some());
        match (status, is_under_way) {
            (Ok(state), Ok(false)) => match state.why_not_running() {
                _ if state.is_running() => Health::Running,
                Some(_) if self.ran && state.word() == IO_ERROR => Health::IoStalled,
                Some(why) => Health::Stands(format!("the guest {why}")),
                None if self.ran => Health::Stands("somebody paused the guest".to_owned()),
                None => Health::Paused,
            },
            (Ok(_), Ok(true)) => {
                Health::Unknown("its disks or settings are not as they were".to_owned())
            }
            (Err(error), _) => Health::Unknown(error.to_string()),
            (_, Err(error)) => Health::Unknown(error.to_string()),
        }
    }
}
