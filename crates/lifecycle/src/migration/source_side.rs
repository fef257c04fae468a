//! The source's state machine, its record on disk, and what carries its actions out.

use super::record::{MigrationRecord, SideRecord};
use crate::container::leaving::{leave_by_record, stay_by_record};
use crate::failure::Failure;
use crate::process::end_qemu;
use dewar_guest_qemu::{Qmp, recover};
use dewar_migrate::Control;
use dewar_registry::{GuestFolder, GuestRecord, Migrations, Phase};
use dewar_wire::control::{ToDestination, ToSource};
use dewar_wire::ownership::{Source, SourceAction, SourceEvent, SourceRecord};

/// The step from which on the guest is the other host's.
pub(crate) const GIVEN: &str = "given";

/// The source's end of the control connection.
pub(crate) type ToTheDestination = Control<ToDestination, ToSource>;

/// What only the caller can do with the guest.
pub(crate) trait Hands {
    /// Stops the guest and sends what was written last and its device state.
    fn stop(&mut self) -> Result<(), Failure>;
    /// Stops it again where its user let it run since.
    fn ensure_stopped(&mut self) -> Result<(), Failure>;
    /// Lets it go on as it was before it was stopped.
    fn resume(&mut self) -> Result<(), Failure>;
    /// Ends its process.
    fn end(&mut self) -> Result<(), Failure>;
}

/// The side that a guest leaves.
pub(crate) struct SourceSide<'s> {
    pub machine: Source,
    pub session: u64,
    /// What is on disk of the migration, or will be.
    pub record: MigrationRecord,
    pub folder: &'s GuestFolder,
    /// The guest's record.
    pub guest: GuestRecord,
    pub control: Option<&'s ToTheDestination>,
    /// Is told of each record that is on disk.
    pub reached: &'s dyn Fn(&str),
}

impl SourceSide<'_> {
    /// Does what follows from an event.
    ///
    /// # Errors
    /// Where an action fails: nothing more is done then, and what is on disk decides
    /// ([`SourceSide::begin_again`]).
    pub fn on(&mut self, event: SourceEvent, hands: &mut dyn Hands) -> Result<(), Failure> {
        let actions = self.machine.on(event);
        self.carry_out(actions, hands)
    }

    /// Goes on from what is on disk, as after a kill.
    pub fn begin_again(&mut self, hands: &mut dyn Hands) -> Result<(), Failure> {
        let on_disk: Option<MigrationRecord> =
            Migrations::new(self.folder.root()).read(self.session)?;
        let (machine, now) = Source::recover(on_disk.and_then(|record| record.source()));
        self.machine = machine;
        self.carry_out(now, hands)
    }

    fn carry_out(
        &mut self,
        actions: Vec<SourceAction>,
        hands: &mut dyn Hands,
    ) -> Result<(), Failure> {
        for action in actions {
            match action {
                SourceAction::Record(Some(record)) => self.write(record)?,
                SourceAction::Record(None) => self.forget()?,
                SourceAction::Send(word) => {
                    // A lost connection is heard of where the answer is waited for.
                    let _ = self.control.map(|it| it.send(&ToDestination::Ownership(word)));
                }
                SourceAction::Stop => hands.stop()?,
                SourceAction::Resume => hands.resume()?,
                SourceAction::Free => self.free(hands)?,
            }
        }
        Ok(())
    }

    fn write(&mut self, record: SourceRecord) -> Result<(), Failure> {
        self.record.side = SideRecord::Source(record);
        Migrations::new(self.folder.root()).write(self.session, &self.record)?;
        if record == SourceRecord::Intent {
            (self.guest.phase, self.guest.migration) = (Phase::Leaving, Some(self.session));
            self.folder.set_record(&self.guest)?;
        }
        (self.reached)(match record {
            SourceRecord::Intent => "intent",
            SourceRecord::Given => GIVEN,
            SourceRecord::Serving => "serving",
            SourceRecord::TakenBack => "taken-back",
            SourceRecord::Gone => "gone",
        });
        Ok(())
    }

    /// The guest is one of this host's like any other.
    fn forget(&mut self) -> Result<(), Failure> {
        (self.guest.phase, self.guest.migration) = (Phase::Running, None);
        self.folder.set_record(&self.guest)?;
        Ok(Migrations::new(self.folder.root()).remove(self.session)?)
    }

    /// Nothing of the guest is left on this host then.
    fn free(&self, hands: &mut dyn Hands) -> Result<(), Failure> {
        hands.end()?;
        (self.reached)("ended");
        self.folder.remove_ram(&self.guest)?;
        // In this order: a guest of whose migration nothing is on disk is this host's.
        self.folder.remove("guest.json")?;
        Migrations::new(self.folder.root()).remove(self.session)?;
        Ok(self.folder.remove_all()?)
    }
}

/// Hands for a guest that is known by its record alone. `connect` leads to its QEMU.
pub(crate) fn hands_by_record<'r>(
    folder: &'r GuestFolder,
    record: &'r GuestRecord,
    connect: impl FnMut() -> Result<Qmp, dewar_guest_qemu::QmpError> + 'r,
) -> Box<dyn Hands + 'r> {
    match record.container {
        Some(_) => Box::new(ContainerByRecord { folder, record }),
        None => Box::new(ByRecord { folder, record, connect }),
    }
}

/// Those for a container.
struct ContainerByRecord<'r> {
    folder: &'r GuestFolder,
    record: &'r GuestRecord,
}

impl Hands for ContainerByRecord<'_> {
    fn stop(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn ensure_stopped(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Failure> {
        stay_by_record(self.folder, self.record)
    }

    fn end(&mut self) -> Result<(), Failure> {
        leave_by_record(self.folder, self.record)
    }
}

/// Those for a virtual machine.
struct ByRecord<'r, F> {
    folder: &'r GuestFolder,
    record: &'r GuestRecord,
    connect: F,
}

impl<F: FnMut() -> Result<Qmp, dewar_guest_qemu::QmpError>> Hands for ByRecord<'_, F> {
    fn stop(&mut self) -> Result<(), Failure> {
        // A migration that is taken up again has no guest to stop.
        Ok(())
    }

    fn ensure_stopped(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Failure> {
        Ok(recover(&mut self.connect, self.folder, self.record)?)
    }

    fn end(&mut self) -> Result<(), Failure> {
        // A connection that was inherited would keep this one out.
        drop((self.connect)());
        end_qemu(self.record)
    }
}
