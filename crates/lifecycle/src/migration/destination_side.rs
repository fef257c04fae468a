//! The destination's state machine, its record on disk, and what carries its actions out.

use super::made_disks;
use super::record::{MigrationRecord, SideRecord};
use crate::container::arriving;
use crate::failure::{Code, Failure};
use crate::process::qmp_failure;
use dewar_guest_qemu::Incoming;
use dewar_guest_qemu::launch::kill;
use dewar_migrate::Control;
use dewar_registry::{GuestFolder, GuestRecord, Migrations, ProcessId};
use dewar_wire::control::{ToDestination, ToSource};
use dewar_wire::ownership::{Destination, DestinationAction, DestinationEvent, DestinationRecord};

/// The destination's end of the control connection.
pub(crate) type ToTheSource = Control<ToSource, ToDestination>;

/// The side that a guest comes to.
pub(crate) struct DestinationSide<'d> {
    pub machine: Destination,
    pub session: u64,
    /// What is on disk of the migration, or will be.
    pub record: MigrationRecord,
    pub folder: &'d GuestFolder,
    /// The guest's record, while nothing is in hand that has it.
    pub guest: Option<GuestRecord>,
    /// The guest on its way into its QEMU.
    pub incoming: Option<Incoming>,
    pub control: Option<&'d ToTheSource>,
    /// What QEMU said against ports that it forwarded.
    pub unforwarded: Vec<String>,
    /// Is told of each record that is on disk.
    pub reached: &'d dyn Fn(&str),
}

impl DestinationSide<'_> {
    /// Does what follows from an event.
    ///
    /// # Errors
    /// Where an action fails: nothing more is done then, and what is on disk decides.
    pub fn on(&mut self, event: DestinationEvent) -> Result<(), Failure> {
        let actions = self.machine.on(event);
        self.carry_out(actions)
    }

    pub fn carry_out(&mut self, actions: Vec<DestinationAction>) -> Result<(), Failure> {
        for action in actions {
            match action {
                DestinationAction::Record(record) => self.write(record)?,
                DestinationAction::Forget => self.forget()?,
                DestinationAction::Send(word) => {
                    // A lost connection is heard of where the next word is waited for.
                    let _ = self.control.map(|it| it.send(&ToSource::Ownership(word)));
                }
                DestinationAction::Run => self.run()?,
                DestinationAction::Discard => self.discard()?,
            }
        }
        Ok(())
    }

    /// The guest's record.
    fn guest(&self) -> Option<GuestRecord> {
        self.incoming.as_ref().map(Incoming::record).or(self.guest.as_ref()).cloned()
    }

    /// Notes which process serves its memory.
    pub fn set_server(&mut self, server: Option<ProcessId>) -> Result<(), Failure> {
        if let Some(incoming) = &mut self.incoming {
            incoming.record_mut().server = server;
            return Ok(incoming.save()?);
        }
        let Some(guest) = &mut self.guest else { return Ok(()) };
        guest.server = server;
        Ok(self.folder.set_record(guest)?)
    }

    fn write(&mut self, record: DestinationRecord) -> Result<(), Failure> {
        self.record.side = SideRecord::Destination(record);
        let migrations = Migrations::new(self.folder.root());
        let is_loaded = || migrations.read::<MigrationRecord>(self.session).map(|it| it.is_some());
        // A guest that was never loaded can never run here: without a record that holds, too.
        if record != DestinationRecord::Refused || is_loaded()? {
            migrations.write(self.session, &self.record)?;
        }
        (self.reached)(match record {
            DestinationRecord::Loaded => "loaded",
            DestinationRecord::Owned => "owned",
            DestinationRecord::Partial => "runs in part",
            DestinationRecord::Running => "running",
            DestinationRecord::Refused => "refused",
        });
        Ok(())
    }

    fn forget(&mut self) -> Result<(), Failure> {
        if let Some(record) = self.guest().filter(|it| it.migration == Some(self.session)) {
            self.folder.set_record(&GuestRecord { migration: None, ..record })?;
        }
        Ok(Migrations::new(self.folder.root()).remove(self.session)?)
    }

    fn run(&mut self) -> Result<(), Failure> {
        if let Some(record) = self.guest.as_ref().filter(|it| it.container.is_some()) {
            self.guest = Some(arriving::run(self.folder, record)?);
            (self.reached)("committed");
            return Ok(());
        }
        if let Some(record) = self.guest.take().filter(|_| self.incoming.is_none()) {
            let resumed = Incoming::resume(self.folder.clone(), record.clone());
            // Should its QEMU not answer, the next command tries again.
            self.incoming =
                Some(resumed.map_err(|error| qmp_failure(&record, &error).attention())?);
        }
        let Some(incoming) = &mut self.incoming else {
            return Err(Failure::new(Code::Attention, "there is nothing of it here to let run"));
        };
        // It is not thrown away any more: before it runs and writes them, whatever becomes of this command.
        made_disks::keep(self.folder);
        self.unforwarded = incoming.commit()?.unforwarded;
        (self.reached)("committed");
        incoming.let_run(&|step| (self.reached)(step))?;
        Ok(())
    }

    /// What is said where the connection is lost.
    pub fn left_behind(&self, failure: Failure) -> Result<(), Failure> {
        let name = self.folder.name();
        match self.machine.record() {
            // The source has only not said its last word.
            Some(DestinationRecord::Running) => Ok(()),
            Some(DestinationRecord::Loaded) => Err(failure
                .attention()
                .state(format!("'{name}' is loaded and waits for the word of the other host"))
                .advice(format!("'dewar migrate {name} --resume' there gives it"))),
            Some(DestinationRecord::Partial) => Err(failure
                .attention()
                .state(format!(
                    "'{name}' runs here, and waits where it needs memory that is still at the other host"
                ))
                .advice(format!("'dewar migrate {name} --resume' there brings it"))),
            _ => Err(failure.state("nothing is left of it here")),
        }
    }

    /// Nothing of the guest is left on this host then.
    fn discard(&mut self) -> Result<(), Failure> {
        match self.guest() {
            Some(record) if record.container.is_some() => {
                arriving::throw_away(self.folder, &record)?;
            }
            Some(record) => {
                self.incoming = None;
                kill(&record.process);
                made_disks::remove(self.folder);
                self.folder.remove_ram(&record)?;
                self.folder.remove_all()?;
            }
            None => {}
        }
        self.guest = None;
        (self.reached)("discarded");
        Ok(())
    }
}
