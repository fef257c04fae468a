//! The side that the guest comes to.

use super::{FromDestination, FromSource};
use serde::{Deserialize, Serialize};

/// What the destination has on disk of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DestinationRecord {
    /// The guest is loaded and stands still; it is still the other host's.
    Loaded,
    /// It is this host's.
    Owned,
    /// It will never be.
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
    /// Send this, if there is a connection.
    Send(FromDestination),
    /// Let the guest run, if it does not.
    Run,
    /// End QEMU, if there is one, and free what was received.
    Discard,
}

/// The destination of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Destination {
    record: Option<DestinationRecord>,
}

impl Destination {
    /// A migration whose pages begin to arrive.
    pub fn new() -> Self {
        Self { record: None }
    }

    /// One that goes on after its process was killed, whose QEMU lives or not; with what has to be done
    /// at once.
    pub fn recover(
        record: Option<DestinationRecord>,
        qemu_lives: bool,
    ) -> (Self, Vec<DestinationAction>) {
        use DestinationAction::{Discard, Run};
        let mut recovered = Self { record };
        let now = match record {
            // What was received only its process knew.
            None | Some(DestinationRecord::Refused) => vec![Discard],
            Some(DestinationRecord::Loaded) if !qemu_lives => recovered.refuse(),
            Some(DestinationRecord::Loaded) => Vec::new(),
            Some(DestinationRecord::Owned) => vec![Run],
        };
        (recovered, now)
    }

    /// What it recorded last.
    pub fn record(&self) -> Option<DestinationRecord> {
        self.record
    }

    /// What follows from an event.
    pub fn on(&mut self, event: DestinationEvent) -> Vec<DestinationAction> {
        use DestinationAction::{Discard, Run, Send};
        use DestinationEvent::{GiveUp, Heard, LinkBack, LinkLost, Loaded};
        use DestinationRecord::{Loaded as IsLoaded, Owned, Refused};
        use FromSource::{Abort, Commit};
        match (self.record, event) {
            (None, Loaded) => vec![self.write(IsLoaded), Send(FromDestination::Ready)],
            // A lost link may be a lost source; without a record there is nothing to wait for.
            (None, LinkLost) => self.refuse(),
            // Of a guest that was never loaded here a commit is as late as one after a refusal.
            (None, Heard(_) | GiveUp) => self.refuse(),
            (Some(IsLoaded), Heard(Commit)) => {
                vec![self.write(Owned), Run, Send(FromDestination::Running)]
            }
            (Some(IsLoaded), Heard(Abort) | GiveUp) => self.refuse(),
            (Some(IsLoaded), LinkBack) => vec![Send(FromDestination::Ready)],
            (Some(Owned), Heard(_) | LinkBack) => vec![Run, Send(FromDestination::Running)],
            (Some(Refused), Heard(Commit) | LinkBack | Loaded) => {
                vec![Discard, Send(FromDestination::Refused)]
            }
            _ => Vec::new(),
        }
    }

    fn refuse(&mut self) -> Vec<DestinationAction> {
        use DestinationAction::{Discard, Send};
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
