//! What is to be undone, in the guest's folder and in memory: the user may remove the folder's
//! files meanwhile.

use super::QemuGuest;
use crate::journal::Journal;
use crate::{rollback, state};
use dewar_guest::GuestError;
use dewar_registry::KeptDisk;
use std::fs;

impl QemuGuest {
    pub(super) fn journal(&self) -> Result<Journal, GuestError> {
        match (Journal::load(&self.folder), &self.noted) {
            (Ok(Some(journal)), _) => Ok(journal),
            // Somebody took the file: the guest is to be put back all the same.
            (_, Some(noted)) => Ok(noted.clone()),
            (found, None) => found
                .map(Option::unwrap_or_default)
                .map_err(|error| self.failed("reading the journal", error)),
        }
    }

    pub(super) fn note(&mut self, journal: Journal) -> Result<(), GuestError> {
        journal.save(&self.folder).map_err(|error| self.failed("writing the journal", error))?;
        self.noted = Some(journal);
        Ok(())
    }

    /// Writes the journal again where its file is gone: the process that puts the guest back goes
    /// by that. Where this fails it is let run, at least.
    pub(super) fn note_again(&mut self) -> Result<(), GuestError> {
        let Some(noted) = self.noted.clone() else { return Ok(()) };
        if matches!(Journal::load(&self.folder), Ok(Some(_))) {
            return Ok(());
        }
        let written = self.folder.make().and_then(|()| noted.save(&self.folder));
        if written.is_err() {
            let _ = self.step("letting it run", |qmp, _, _| {
                let _ = noted.stopping.then(|| state::cancel_migration(qmp));
                rollback::resume(qmp, &noted)
            });
        }
        written.map_err(|error| self.failed("writing the journal again", error))
    }

    /// Notes the disks' own files as they are while all writes go to the overlays: should
    /// host and guest end now, nobody else may have written them before they are made
    /// current.
    pub(super) fn note_frozen_files(&mut self) -> Result<Journal, GuestError> {
        let mut journal = self.journal()?;
        if self.record.arguments.iter().any(|word| word.contains("copy-on-read")) {
            // Then QEMU writes to them where it reads.
            return Ok(journal);
        }
        for (noted, disk) in journal.disks.iter_mut().zip(&self.found.disks) {
            let path = self.record.folder.join(&disk.file);
            // Its time of change, too, is to outlive the host.
            let synced = fs::File::open(&path).and_then(|file| file.sync_all());
            noted.kept = synced.ok().and_then(|()| KeptDisk::of(&path));
        }
        // Without it nobody is warned; nothing is lost by that alone.
        let _ = self.note(journal.clone());
        Ok(journal)
    }
}
