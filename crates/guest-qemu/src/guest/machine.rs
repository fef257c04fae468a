//! What an image says of how to start a guest again, and which disks it is without.

use super::QemuGuest;
use crate::cmdline::{disk_places, file_of, plan_restore};
use crate::discover::Disk;
use crate::journal::Journal;
use crate::machine::command_line::current_line;
use crate::run_state::{RUNNING, RunState};
use dewar_guest::GuestError;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

impl QemuGuest {
    /// Leaves disks out of what is captured, each by its name or by its file: a restored guest
    /// finds empty ones in their place.
    ///
    /// # Errors
    /// The first that the guest has not, and the names of those that it has.
    pub fn exclude(&mut self, disks: &[String]) -> Result<(), (String, Vec<String>)> {
        for wanted in disks {
            let file = fs::canonicalize(wanted).ok();
            let is_it = |disk: &Disk| {
                let own = file_of(&disk.file).map(|own| self.record.folder.join(own));
                disk.info.name == *wanted
                    || own
                        .and_then(|own| fs::canonicalize(own).ok())
                        .is_some_and(|it| Some(it) == file)
            };
            let Some(index) = self.found.disks.iter().position(is_it) else {
                let names = self.found.disks.iter().map(|disk| disk.info.name.clone()).collect();
                return Err((wanted.clone(), names));
            };
            self.excluded.push(self.found.disks.remove(index));
        }
        Ok(())
    }

    /// How to start this guest again, for an image's record.
    ///
    /// # Errors
    /// Where a writable disk is not on the command line, so that a restored
    /// guest could not be given its copy, or where it is not known how what was
    /// plugged in could be started again.
    pub fn machine(&mut self) -> Result<Value, GuestError> {
        // A device that was plugged in or out since is in the state that is saved.
        let line = current_line(&mut self.qmp, &self.record.arguments, &self.record.folder)
            .map_err(|error| self.unsupported(error.to_string()))?;
        self.refuse_what_would_not_be_there(&line)?;
        // Found out now, and not when it is to be brought back.
        let (socket, ram) = (self.folder.file("qmp.sock"), |id: &str| PathBuf::from(id));
        let (kind, folder) = (&self.found.machine, &self.record.folder);
        plan_restore(&line, &socket, ram, &HashMap::new(), kind, folder)
            .map_err(|why| self.unsupported(format!("it could not be restored: {why}")))?;
        let places =
            disk_places(&line).map_err(|error| self.failed("reading the command line", error))?;
        let real = |file: &str| {
            let path = self.record.folder.join(file);
            fs::canonicalize(&path).unwrap_or(path)
        };
        let (mut disks, mut excluded) = (Vec::new(), Vec::new());
        let is_excluded = |disk: &Disk| self.excluded.contains(disk);
        for disk in self.found.disks.iter().chain(&self.excluded) {
            let own = file_of(&disk.file).map(|file| real(&file));
            let is_own = |path: &str| file_of(path).map(|file| real(&file)) == own;
            let place = places.iter().position(|place| own.is_some() && is_own(&place.path));
            let Some(place) = place else {
                let reason = format!(
                    "disk '{}' ({}) is not on QEMU's command line, so it could not be restored",
                    disk.info.name, disk.file
                );
                return Err(self.unsupported(reason));
            };
            let (name, bytes) = (&disk.info.name, disk.info.virtual_bytes);
            match is_excluded(disk) {
                true => {
                    excluded.push(json!({"name": name, "place": place, "virtual_bytes": bytes}))
                }
                false => disks.push(json!({"name": name, "place": place})),
            }
        }
        self.line = Some(line.clone());
        let held = Journal::load(&self.folder).ok().flatten().is_some_and(|it| it.held);
        let state = self.step("asking for its status", |qmp, _, _| RunState::of(qmp))?;
        // One that we hold still goes on where it is brought back.
        let run_state = if held { RUNNING } else { state.word() };
        let record = &self.record;
        Ok(json!({
            "hypervisor": "qemu",
            "program": record.program,
            "arguments": line,
            "folder": record.folder,
            "version": self.found.version,
            "machine": self.found.machine,
            "run_state": run_state,
            "disks": disks,
            "excluded": excluded,
        }))
    }
}
