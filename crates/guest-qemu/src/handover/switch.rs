//! Starting the new QEMU and moving the guest.

use super::error::HandoverError;
use super::finish::{Moved, back, forward};
use super::outcome::{Outcome, outcome};
use super::plan::{Plan, refuse_what_changed, refuse_what_is_under_way};
use super::tap::{self, TapKeeper};
use super::under_way::{Handover, SOCKET, Stage};
use crate::guest::QemuGuest;
use crate::incoming::{Incoming, IncomingError};
use crate::journal::Journal;
use crate::launch::{Inherited, Launched, launch};
use crate::machine::forwards;
use crate::qmp::QmpError;
use crate::rollback::{change_settings, journal_of};
use crate::run_state::is_running;
use crate::state::{self, StateError};
use dewar_guest::{Guest, GuestError};
use dewar_memory::{ProcessHandle, Ram, UffdOrigin};
use dewar_registry::GuestRecord;
use serde_json::json;

/// A new QEMU that waits for the guest. Dropped, it is ended and the guest stays
/// where it is.
#[derive(Debug)]
pub struct Waiting<'g> {
    guest: &'g mut QemuGuest,
    handover: Handover,
    new: Option<Incoming>,
    /// Until the new QEMU has set its taps up: the guest that it loads has its own way.
    keeper: Option<TapKeeper>,
    done: bool,
}

impl Plan {
    /// Starts the new QEMU.
    ///
    /// # Errors
    /// Where it does not start or is not fit for the guest; it is ended, and the
    /// guest runs on as it did.
    pub fn start(self, guest: &mut QemuGuest) -> Result<Waiting<'_>, HandoverError> {
        let record = guest.record.clone();
        let qmp = &mut guest.qmp;
        let capabilities = qmp.execute("query-migrate-capabilities", json!({}))?;
        let parameters = qmp.execute("query-migrate-parameters", json!({}))?;
        let journal = journal_of(qmp, self.bitmaps)?;
        let mut renames = self.taken.renames;
        let (mut headers, taps) = self.headers;
        // Its user may have been asked meanwhile, and the guest have booted.
        tap::look_again(&mut headers, &taps);
        let next = GuestRecord {
            program: self.program.clone(),
            arguments: self.line,
            descriptors: self.taken.descriptors,
            qmp: guest.folder.file("qmp.sock"),
            ram: self.ram,
            adopted: false,
            ..record.clone()
        };
        let socket = guest.folder.file(SOCKET);
        renames.push(crate::cmdline::Rename { aside: socket.clone(), own: next.qmp.clone() });
        let handover = Handover {
            stage: Stage::Starting,
            old: record.process,
            old_socket: record.qmp.clone(),
            new: None,
            was_running: journal.was_running,
            next,
            renames,
            later: self.taken.later,
            forwards: self.forwards,
            taps: headers,
            capabilities,
            parameters,
        };
        let folder = guest.folder.clone();
        let keeper = Some(TapKeeper::start(taps));
        let mut waiting = Waiting { guest, handover, new: None, keeper, done: false };
        waiting.handover.save(&folder)?;
        journal.save(&folder)?;
        let log = folder.file("console.log");
        let inherited = Inherited { files: self.files, network: self.network };
        let launched = launch(&self.program, &self.run, &record.folder, &log, &socket, inherited)?;
        waiting.take(launched, self.bitmaps)?;
        Ok(waiting)
    }
}

impl Waiting<'_> {
    /// Notes the new QEMU and sees that it is fit.
    fn take(&mut self, launched: Launched, bitmaps: bool) -> Result<(), HandoverError> {
        self.handover.new = Some(launched.process);
        self.handover.save(&self.guest.folder)?;
        let next = GuestRecord { process: launched.process, ..self.handover.next.clone() };
        let program = next.program.clone();
        let unfit = |why: &str| HandoverError::Unfit { program, why: why.to_owned() };
        let mut new = Incoming::new(self.guest.folder.clone(), next, launched.qmp);
        if let Err(IncomingError::ForeignRam(path)) = new.require_ram() {
            return Err(unfit(&format!("does not use the RAM file {}", path.display())));
        }
        let qmp = new.qmp();
        let status = qmp.execute("query-status", json!({}))?;
        if status["status"] != "inmigrate" {
            return Err(unfit("does not wait for the guest"));
        }
        // It has set its taps up by now. The keeper may not have had its turn yet; later it
        // would be in the way of a guest that boots, or that is loaded.
        drop(self.keeper.take());
        tap::restore(&self.handover.old, &std::mem::take(&mut self.handover.taps));
        self.handover.save(&self.guest.folder)?;
        let needed = state::capabilities_to_change(qmp, bitmaps)?;
        state::set_capabilities(qmp, needed.into_iter().map(|(name, now)| (name, !now)))?;
        let ignores = qmp.execute("query-migrate-capabilities", json!({}))?;
        let mut all = ignores.as_array().into_iter().flatten();
        if !all.any(|it| it["capability"] == "x-ignore-shared" && it["state"] == true) {
            return Err(unfit("cannot leave shared RAM where it is"));
        }
        self.new = Some(new);
        Ok(())
    }

    /// The new QEMU's process and the guest's RAM as it has it mapped, and how it
    /// may make a userfaultfd.
    ///
    /// # Errors
    /// Where its RAM is not mapped as it should be.
    pub fn memory(&mut self) -> Result<(ProcessHandle, Ram, UffdOrigin), GuestError> {
        let new = self.new.as_mut().ok_or_else(|| GuestError::Ended {
            guest: self.guest.record.name.clone(),
            operation: "its new QEMU was looked at".to_owned(),
        })?;
        new.memory()
    }

    /// Moves the guest. `step` is told where we are; `before_end` is called when
    /// the old QEMU has stopped for good and is still there.
    ///
    /// # Errors
    /// Where the new QEMU does not take it; the guest then runs on in the old
    /// one ([`HandoverError::Unknown`] and [`HandoverError::Crashed`] apart).
    pub fn go(
        mut self,
        step: &dyn Fn(&str),
        before_end: &mut dyn FnMut(),
    ) -> Result<Moved, HandoverError> {
        let folder = self.guest.folder.clone();
        let Some(mut new) = self.new.take() else {
            return Err(self.refused("it ended while it waited"));
        };
        // A tool that wanted to track it has begun.
        new.close_uffd_device();
        let mut new = new.into_qmp();
        // What the host caches of its disks must not be written in the pause.
        self.guest.flush()?;
        let mut journal = Journal::load(&folder)?.unwrap_or_default();
        // Starting the new QEMU took a while; the user was not kept out.
        refuse_what_is_under_way(self.guest)?;
        refuse_what_changed(self.guest, &self.handover.next.arguments)?;
        self.handover.forwards = forwards::forwards(&mut self.guest.qmp)?;
        self.handover.was_running = is_running(&mut self.guest.qmp)?;
        journal.was_running = self.handover.was_running;
        journal.stopping = true;
        journal.save(&folder)?;
        let old = &mut self.guest.qmp;
        change_settings(old, &journal)?;
        self.handover.stage = Stage::Moving;
        self.handover.save(&folder)?;
        step("moving");
        if let Err(error) = state::connect(old, &mut new) {
            return Err(self.refused(&error.to_string()));
        }
        step("listening");
        match state::begin(old) {
            // A QEMU that is silent may have begun all the same.
            Ok(()) | Err(StateError::Qmp(QmpError::Silent { .. })) => {}
            Err(error) => return Err(self.refused(&error.to_string())),
        }
        step("begun");
        match outcome(&self.handover, &folder, Some(old), Some(new)) {
            Outcome::Moved(new) => {
                step("resumed");
                self.done = true;
                let handover = self.handover.clone();
                let old = Some(&mut self.guest.qmp);
                let moved = forward(&folder, handover, old, new, before_end)
                    .map_err(|error| HandoverError::Unfinished(Box::new(error)))?;
                let lives = moved.record.process.is_alive();
                if lives { Ok(moved) } else { Err(HandoverError::Crashed) }
            }
            Outcome::Stayed => Err(self.refused(match self.guest.record.process.is_alive() {
                true => "the guest went on where it was",
                false => "the QEMU before ended",
            })),
            Outcome::Unknown => {
                self.done = true;
                let record = &self.guest.record;
                Err(HandoverError::Unknown(record.name.clone(), record.process.pid))
            }
        }
    }

    /// The error of a new QEMU that does not take the guest, with its own words.
    fn refused(&mut self, why: &str) -> HandoverError {
        let said = crate::launch::last_words(&self.guest.folder.file("console.log"));
        let why = said.map_or_else(|| why.to_owned(), |said| format!("{why}; it said: {said}"));
        HandoverError::Refused { program: self.handover.next.program.clone(), why }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.new = None;
            // What is left shows in the guest's health, and the next command
            // tries again.
            let folder = self.guest.folder.clone();
            let mut other = None;
            let usable = self.guest.qmp.execute("query-status", json!({})).is_ok();
            if !usable {
                other = self.handover.connect_old();
            }
            let old = if usable { Some(&mut self.guest.qmp) } else { other.as_mut() };
            let _ = back(&folder, &self.handover, old);
        }
    }
}
