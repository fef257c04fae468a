//! What keeps a checkpoint from being taken, or from being right: asked before the guest is
//! touched, and again when it matters, since its user is not kept out.

use super::QemuGuest;
use crate::cmdline::{own_reset_option, served_nodes};
use crate::discover::Disk;
use crate::journal::Journal;
use crate::machine::command_line::current_line;
use crate::machine::disks::{changed_medium, missing_file, unrestorable_disk};
use crate::qmp::QmpError;
use crate::rollback::END_WITHIN;
use crate::run_state::{ASLEEP, RunState, status};
use crate::state;
use dewar_guest::GuestError;
use serde_json::json;

impl QemuGuest {
    /// That QEMU can save its state now, and nobody else has it do so.
    pub(super) fn refuse_what_cannot_be_saved(&mut self) -> Result<(), GuestError> {
        let (status, migrating) = self.step("asking for its status", |qmp, _, _| {
            Ok::<_, QmpError>((status(qmp)?, state::is_migrating(qmp)?))
        })?;
        let reason = match status.as_str() {
            _ if migrating => "a migration of it is under way",
            // QEMU saves the state of a guest that stands still only once, until it
            // runs again; and until then nothing changes.
            "postmigrate" => {
                "it has stood still since its state was last saved, and QEMU saves it only \
                 once; that checkpoint is still exact, or let the guest run first"
            }
            "suspended" => ASLEEP,
            _ => return Ok(()),
        };
        Err(self.unsupported(reason.to_owned()))
    }

    /// That no device came or went since the image's record was begun: what is in the
    /// state that was saved and not in the record could not be restored.
    pub(super) fn refuse_another_machine(&mut self) -> Result<(), GuestError> {
        let Some(line) = self.line.clone() else { return Ok(()) };
        let now = current_line(&mut self.qmp, &self.record.arguments, &self.record.folder);
        match now {
            Ok(now) if now == line => match changed_medium(&mut self.qmp, &self.record, &line) {
                Ok(Some(why)) => Err(self.failed("looking at its disks", why)),
                Ok(None) => Ok(()),
                Err(_) if self.process.ends_within(END_WITHIN) => Ok(()),
                Err(error) => Err(self.failed("looking at its disks", error)),
            },
            Ok(_) => Err(self.failed("looking at the devices", "they were changed meanwhile")),
            // It has ended, and can tell nobody; all was captured by then.
            Err(_) if self.process.ends_within(END_WITHIN) => Ok(()),
            Err(error) => Err(self.failed("looking at the devices", error)),
        }
    }

    /// That a restored guest would find its disks and media, and its kernel.
    pub(super) fn refuse_what_would_not_be_there(
        &mut self,
        line: &[String],
    ) -> Result<(), GuestError> {
        let found = unrestorable_disk(&mut self.qmp, &self.record, line)
            .map_err(|error| self.failed("looking at its disks", error))?;
        match found.or_else(|| missing_file(&self.record, line)) {
            Some(why) => Err(self.unsupported(format!("it could not be restored: {why}"))),
            None => Ok(()),
        }
    }

    /// That nobody stopped the guest, or let it run, since we looked: its disks were
    /// prepared for the one or the other.
    pub(super) fn refuse_another_status(&mut self, journal: &Journal) -> Result<(), GuestError> {
        let state = self.step("asking for its status", |qmp, _, _| RunState::of(qmp))?;
        let what = match (journal.was_running, state.is_running()) {
            (true, false) => match state.why_not_running() {
                Some(why) => format!("meanwhile it {why}"),
                None => "somebody stopped it meanwhile".to_owned(),
            },
            (false, true) => "somebody let it run meanwhile".to_owned(),
            _ => return Ok(()),
        };
        Err(self.failed("stopping", what))
    }

    /// That it is not held at its reset: who holds it waits for us to be done, and is to go on with the guest that it has.
    pub(super) fn refuse_reset_under_way(&mut self) -> Result<(), GuestError> {
        let line = &self.record.arguments;
        if served_nodes(line).is_empty() || own_reset_option(line).is_some() {
            return Ok(());
        }
        let state = self.step("asking for its status", |qmp, _, _| RunState::of(qmp))?;
        match state.is_off() {
            true => Err(self.failed("stopping", "it is just being reset; try again")),
            false => Ok(()),
        }
    }

    /// That its disks are those for which overlays were made, and as large.
    pub(super) fn refuse_other_disks(&mut self) -> Result<(), GuestError> {
        let blocks =
            self.step("looking at its disks", |qmp, _, _| qmp.execute("query-block", json!({})))?;
        let is_there = |disk: &Disk| {
            blocks.as_array().into_iter().flatten().map(|block| &block["inserted"]).any(|it| {
                it["node-name"] == disk.top
                    && it["image"]["virtual-size"] == disk.info.virtual_bytes
            })
        };
        match self.found.disks.iter().find(|disk| !is_there(disk)) {
            Some(Disk { info, .. }) => {
                let what = format!("its disk '{}' was changed meanwhile", info.name);
                Err(self.failed("stopping", what))
            }
            None => Ok(()),
        }
    }

    pub(super) fn refuse_existing_overlays(&self, journal: &Journal) -> Result<(), GuestError> {
        let existing: Vec<String> = journal
            .disks
            .iter()
            .filter(|disk| disk.overlay.exists())
            .map(|disk| {
                format!(
                    "{} exists: a checkpoint under another --root was cut short; finish it there",
                    disk.overlay.display()
                )
            })
            .collect();
        if existing.is_empty() {
            return Ok(());
        }
        Err(GuestError::Unsupported { guest: self.record.name.clone(), reasons: existing })
    }
}
