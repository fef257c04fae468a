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
    /// It is this host's again.
    TakenBack,
    /// The other host runs it.
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
    /// Write and fsync this; `None`: nothing is known of the migration any more.
    Record(Option<SourceRecord>),
    /// Send this, if there is a connection.
    Send(FromSource),
    /// Stop the guest, and send what was written last and its device state.
    Stop,
    /// Let the guest run, if it does not.
    Run,
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

    /// One that goes on after its process was killed; with what has to be done at once.
    pub fn recover(record: Option<SourceRecord>) -> (Self, Vec<SourceAction>) {
        use SourceAction::{Free, Record, Run};
        let stays = |record| Self { record, aborted: true };
        match record {
            None => (stays(None), vec![Run]),
            Some(SourceRecord::Intent | SourceRecord::TakenBack) => {
                (stays(None), vec![Run, Record(None)])
            }
            Some(SourceRecord::Given) => (Self { record, aborted: false }, Vec::new()),
            Some(SourceRecord::Gone) => (Self { record, aborted: false }, vec![Free]),
        }
    }

    /// What it recorded last.
    pub fn record(&self) -> Option<SourceRecord> {
        self.record
    }

    /// Whether the migration has come to its end, as far as this side is concerned.
    pub fn is_over(&self) -> bool {
        self.aborted || matches!(self.record, Some(SourceRecord::Gone | SourceRecord::TakenBack))
    }

    /// What follows from an event.
    pub fn on(&mut self, event: SourceEvent) -> Vec<SourceAction> {
        use SourceAction::{Free, Record, Run, Send, Stop};
        use SourceEvent::{Converged, GiveUp, Heard, LinkBack, LinkLost, TakeBack};
        use SourceRecord::{Given, Gone, Intent, TakenBack};
        match (self.record, event) {
            (_, Heard(FromDestination::Ready) | LinkBack) if self.aborted => {
                vec![Send(FromSource::Abort)]
            }
            (None, Converged) if !self.aborted => {
                vec![self.write(Intent), Stop]
            }
            (None | Some(Intent), LinkLost | GiveUp | Heard(FromDestination::Refused))
                if !self.aborted =>
            {
                self.aborted = true;
                self.record = None;
                vec![Run, Record(None), Send(FromSource::Abort)]
            }
            (Some(Intent), Heard(FromDestination::Ready)) => {
                vec![self.write(Given), Send(FromSource::Commit)]
            }
            (Some(Given), Heard(FromDestination::Ready) | LinkBack) => {
                vec![Send(FromSource::Commit)]
            }
            (Some(Given), Heard(FromDestination::Running)) => vec![self.write(Gone), Free],
            (Some(Given), Heard(FromDestination::Refused) | TakeBack) => {
                vec![self.write(TakenBack), Run]
            }
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
