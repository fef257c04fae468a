//! The side that the guest comes to.

use super::{FromDestination, FromSource};
use serde::{Deserialize, Serialize};

/// What the destination has on disk of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DestinationRecord {
    /// The guest is loaded and stands still; it is still the other host's.
    Loaded,
    /// It is this host's, and about to be let run.
    Owned,
    /// It was let run; from here on it is a guest like any other.
    Running,
    /// It will never run here.
    Refused,
}

/// What happens to the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationEvent {
    /// All pages and the device state are there, and QEMU has loaded them.
    Loaded,
    /// The other side said this.
    Heard(FromSource),
    /// The connection is lost.
    LinkLost,
    /// There is a connection again.
    LinkBack,
    /// The user does not want the guest here, or its QEMU has ended, or something failed.
    GiveUp,
}

/// What the caller has to do, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationAction {
    /// Write and fsync this.
    Record(DestinationRecord),
    /// Remove the record: the source will not ask again.
    Forget,
    /// Send this, if there is a connection.
    Send(FromDestination),
    /// Let the guest run, if it ran at the source.
    Run,
    /// End QEMU, if there is one, and free what was received.
    Discard,
}

/// The destination of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Destination {
    record: Option<DestinationRecord>,
    /// Whether pages arrive, or have arrived: only that can be loaded.
    receiving: bool,
    /// Whether its QEMU ended when the guest may have run in it, or not.
    lost: bool,
}

impl Destination {
    /// A migration whose pages begin to arrive.
    pub fn new() -> Self {
        Self { record: None, receiving: true, lost: false }
    }

    /// One that goes on after its process was killed, whose QEMU lives or not, or one that is asked about
    /// and of which nothing is on record; with what has to be done at once. What a killed process had
    /// received and not recorded is not this value's: it is thrown away with the guest that was arriving.
    pub fn recover(
        record: Option<DestinationRecord>,
        qemu_lives: bool,
    ) -> (Self, Vec<DestinationAction>) {
        use DestinationAction::{Discard, Record, Run};
        use DestinationRecord::{Loaded, Owned, Refused, Running};
        let mut recovered = Self { record, receiving: false, lost: false };
        let now = match record {
            Some(Refused) => vec![Discard],
            Some(Loaded) if !qemu_lives => recovered.refuse(),
            Some(Owned) if !qemu_lives => {
                recovered.lost = true;
                Vec::new()
            }
            Some(Owned) => {
                recovered.record = Some(Running);
                vec![Run, Record(Running)]
            }
            None | Some(Loaded | Running) => Vec::new(),
        };
        (recovered, now)
    }

    /// What it recorded last.
    pub fn record(&self) -> Option<DestinationRecord> {
        self.record
    }

    /// Whether a person has to say what becomes of the guest: its QEMU ended, and it is not known
    /// whether the guest ran in it. All of it is still at the source.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// What follows from an event.
    pub fn on(&mut self, event: DestinationEvent) -> Vec<DestinationAction> {
        use DestinationAction::{Forget, Record, Run, Send};
        use DestinationEvent::{GiveUp, Heard, LinkBack, LinkLost, Loaded};
        use DestinationRecord::{Loaded as IsLoaded, Owned, Refused, Running};
        use FromSource::{Abort, Commit, Gone};
        match (self.record, event) {
            (None, Loaded) if self.receiving => {
                vec![self.write(IsLoaded), Send(FromDestination::Ready)]
            }
            // A lost link may be a lost source; without a record there is nothing to wait for.
            (None, LinkLost | GiveUp | Heard(Commit | Abort)) if self.receiving => self.refuse(),
            // It can never be loaded any more: that need not be recorded. What is forgotten and runs
            // here is a guest like any other, and the source does not ask.
            (None, Heard(Commit)) => vec![Send(FromDestination::Refused)],
            (Some(IsLoaded), Heard(Commit)) => {
                let owned = self.write(Owned);
                (self.record, self.receiving) = (Some(Running), false);
                vec![owned, Run, Record(Running), Send(FromDestination::Running)]
            }
            (Some(IsLoaded), Heard(Abort) | GiveUp) => self.refuse(),
            (Some(IsLoaded), LinkBack) => vec![Send(FromDestination::Ready)],
            (Some(Running), Heard(Commit) | LinkBack) => vec![Send(FromDestination::Running)],
            (Some(Running), Heard(Gone)) => {
                self.record = None;
                vec![Forget]
            }
            (Some(Refused), Heard(Commit) | LinkBack) => vec![Send(FromDestination::Refused)],
            (Some(Refused), Heard(Abort)) => {
                self.record = None;
                vec![Forget]
            }
            _ => Vec::new(),
        }
    }

    fn refuse(&mut self) -> Vec<DestinationAction> {
        use DestinationAction::{Discard, Send};
        self.receiving = false;
        vec![self.write(DestinationRecord::Refused), Discard, Send(FromDestination::Refused)]
    }

    fn write(&mut self, record: DestinationRecord) -> DestinationAction {
        self.record = Some(record);
        DestinationAction::Record(record)
    }
}

impl Default for Destination {
    fn default() -> Self {
        Self::new()
    }
}
