//! The side that the guest leaves.

use super::{FromDestination, FromSource};
use serde::{Deserialize, Serialize};

/// What the source has on disk of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SourceRecord {
    /// The guest is about to be stopped; it is still this host's.
    Intent,
    /// It is no longer this host's, unless the other refuses it.
    Given,
    /// It runs at the other host, which needs memory that is still here.
    Serving,
    /// It is this host's again, and about to go on.
    TakenBack,
    /// The other host has it.
    Gone,
}

/// What happens to the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceEvent {
    /// What is left fits the pause: the guest is to be stopped next.
    Converged,
    /// The other side said this.
    Heard(FromDestination),
    /// The connection is lost.
    LinkLost,
    /// There is a connection again.
    LinkBack,
    /// The user wants the guest to stay, or something failed here.
    GiveUp,
    /// The user is sure that the other host will never run the guest.
    TakeBack,
}

/// What the caller has to do, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceAction {
    /// Write and fsync this; `None`: remove the record, and fsync that.
    Record(Option<SourceRecord>),
    /// Send this, if there is a connection.
    Send(FromSource),
    /// Note whether the guest runs, stop it, and send what was written last and its device state.
    Stop,
    /// Let the guest go on as it was before [`SourceAction::Stop`]: a paused one stays paused.
    Resume,
    /// End the guest's process and free its memory.
    Free,
}

/// The source of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source {
    record: Option<SourceRecord>,
    /// Whether the guest stays, and the other side is to know.
    aborted: bool,
}

impl Source {
    /// A migration whose pages begin to be sent; the guest runs.
    pub fn new() -> Self {
        Self { record: None, aborted: false }
    }

    /// One that goes on after its process was killed, or one that is asked about and of which nothing is
    /// on record; with what has to be done at once.
    pub fn recover(record: Option<SourceRecord>) -> (Self, Vec<SourceAction>) {
        use SourceAction::{Free, Record, Resume};
        let stays = Self { record: None, aborted: true };
        match record {
            None => (stays, Vec::new()),
            Some(SourceRecord::Intent | SourceRecord::TakenBack) => {
                (stays, vec![Resume, Record(None)])
            }
            Some(SourceRecord::Given | SourceRecord::Serving) => {
                (Self { record, aborted: false }, Vec::new())
            }
            Some(SourceRecord::Gone) => (Self { record, aborted: false }, vec![Free]),
        }
    }

    /// What it recorded last.
    pub fn record(&self) -> Option<SourceRecord> {
        self.record
    }

    /// Whether it is known on which side the guest is. The source still answers the destination.
    pub fn is_decided(&self) -> bool {
        self.aborted || self.record == Some(SourceRecord::Gone)
    }

    /// What follows from an event.
    pub fn on(&mut self, event: SourceEvent) -> Vec<SourceAction> {
        use FromDestination::{Partial, Ready, Refused, Running};
        use SourceAction::{Free, Record, Resume, Send, Stop};
        use SourceEvent::{Converged, GiveUp, Heard, LinkBack, LinkLost, TakeBack};
        use SourceRecord::{Given, Gone, Intent, Serving, TakenBack};
        match (self.record, event) {
            // Without a record it has not given the guest away, or has forgotten that it is gone.
            (None, Heard(Running)) => vec![Send(FromSource::Gone)],
            (None, Heard(Ready | Refused) | LinkBack) if self.aborted => {
                vec![Send(FromSource::Abort)]
            }
            (None, Converged) if !self.aborted => vec![self.write(Intent), Stop],
            (None, LinkLost | GiveUp | Heard(Refused)) if !self.aborted => {
                self.aborted = true;
                vec![Send(FromSource::Abort)]
            }
            (Some(Intent), LinkLost | GiveUp | Heard(Refused)) => {
                (self.record, self.aborted) = (None, true);
                vec![Resume, Record(None), Send(FromSource::Abort)]
            }
            (Some(Intent), Heard(Ready)) => vec![self.write(Given), Send(FromSource::Commit)],
            (Some(Given), Heard(Ready)) | (Some(Given | Serving), LinkBack) => {
                vec![Send(FromSource::Commit)]
            }
            (Some(Given), Heard(Partial)) => vec![self.write(Serving)],
            (Some(Given | Serving), Heard(Running)) => {
                vec![self.write(Gone), Send(FromSource::Gone), Free]
            }
            (Some(Given), Heard(Refused) | TakeBack) => {
                let taken_back = self.write(TakenBack);
                (self.record, self.aborted) = (None, true);
                vec![taken_back, Resume, Record(None), Send(FromSource::Abort)]
            }
            (Some(Gone), Heard(Running) | LinkBack) => vec![Send(FromSource::Gone)],
            _ => Vec::new(),
        }
    }

    fn write(&mut self, record: SourceRecord) -> SourceAction {
        self.record = Some(record);
        SourceAction::Record(self.record)
    }
}

impl Default for Source {
    fn default() -> Self {
        Self::new()
    }
}
