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
    /// It was let run, and part of its memory is still at the other host.
    Partial,
    /// It was let run and has all of its memory; from here on it is a guest like any other.
    Running,
    /// It will never run here.
    Refused,
}

/// What happens to the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationEvent {
    /// All pages and the device state are there, and QEMU has loaded them.
    Loaded,
    /// The device state is there and loaded; part of the pages comes when the guest runs.
    LoadedInPart,
    /// All pages are there; or the guest has ended and needs none any more.
    Complete,
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
    /// Whether part of its memory is still at the source.
    partial: bool,
    /// Whether its QEMU ended when the guest may have run in it, or not.
    lost: bool,
}

impl Destination {
    /// A migration whose pages begin to arrive.
    pub fn new() -> Self {
        Self { record: None, receiving: true, partial: false, lost: false }
    }

    /// One that goes on after its process was killed, whose QEMU lives or not and lacks memory (`partial`) or
    /// not, or one that is asked about and of which nothing is on record; with what has to be done at once. What a killed process had
    /// received and not recorded is not this value's: it is thrown away with the guest that was arriving.
    pub fn recover(
        record: Option<DestinationRecord>,
        qemu_lives: bool,
        partial: bool,
    ) -> (Self, Vec<DestinationAction>) {
        use DestinationAction::{Discard, Run};
        use DestinationRecord::{Loaded, Owned, Partial, Refused, Running};
        let partial = partial && qemu_lives;
        let mut recovered = Self { record, receiving: false, partial, lost: false };
        let now = match record {
            Some(Refused) => vec![Discard],
            Some(Loaded) if !qemu_lives => recovered.refuse(),
            Some(Owned) if !qemu_lives => {
                recovered.lost = true;
                Vec::new()
            }
            Some(Owned) => {
                let runs = recovered.runs();
                vec![Run, recovered.write(runs)]
            }
            // A guest that has ended needs no memory.
            Some(Partial) if !partial => vec![recovered.write(Running)],
            None | Some(Loaded | Partial | Running) => Vec::new(),
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
        use DestinationAction::{Forget, Run, Send};
        use DestinationEvent::{Complete, GiveUp, Heard, LinkBack, LinkLost, Loaded, LoadedInPart};
        use DestinationRecord::{Loaded as IsLoaded, Owned, Partial, Refused, Running};
        use FromSource::{Abort, Commit, Gone};
        match (self.record, event) {
            (None, Loaded | LoadedInPart) if self.receiving => {
                self.partial = event == LoadedInPart;
                vec![self.write(IsLoaded), Send(FromDestination::Ready)]
            }
            // A lost link may be a lost source; without a record there is nothing to wait for.
            (None, LinkLost | GiveUp | Heard(Commit | Abort)) if self.receiving => self.refuse(),
            // It can never be loaded any more: that need not be recorded. What is forgotten and runs
            // here is a guest like any other, and the source does not ask.
            (None, Heard(Commit)) => vec![Send(FromDestination::Refused)],
            (Some(IsLoaded), Heard(Commit)) => {
                self.receiving = false;
                let (owned, runs) = (self.write(Owned), self.runs());
                vec![owned, Run, self.write(runs), Send(self.word())]
            }
            (Some(IsLoaded), Complete) => {
                self.partial = false;
                Vec::new()
            }
            (Some(Partial), Complete) => {
                self.partial = false;
                vec![self.write(Running), Send(FromDestination::Running)]
            }
            (Some(IsLoaded), Heard(Abort) | GiveUp) => self.refuse(),
            (Some(IsLoaded), LinkBack) => vec![Send(FromDestination::Ready)],
            (Some(Partial | Running), Heard(Commit) | LinkBack) => vec![Send(self.word())],
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

    /// How it is on record when it was let run.
    fn runs(&self) -> DestinationRecord {
        match self.partial {
            true => DestinationRecord::Partial,
            false => DestinationRecord::Running,
        }
    }

    /// What is said of a guest that was let run.
    fn word(&self) -> FromDestination {
        match self.partial {
            true => FromDestination::Partial,
            false => FromDestination::Running,
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
