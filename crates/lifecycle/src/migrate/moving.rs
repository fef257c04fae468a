//! A migration under way, as the source sees it: what is the same for virtual machines and containers.

use super::resume::still_given;
use super::serving::Serving;
use crate::failure::{Code, Failure, GONE};
use crate::guardian::Pauses;
use crate::migration::{GIVEN, Hands, SourceSide};
use crate::reporter::Reporter;
use dewar_guest::Health;
use dewar_migrate::GpuUsed;
use dewar_registry::GuestFolder;
use dewar_wire::ownership::{FromDestination, SourceEvent, SourceRecord};
use std::time::{Duration, Instant};

/// A guest that moved.
#[derive(Debug)]
pub struct Migrated {
    /// From the beginning until the other host said that it runs.
    pub total: Duration,
    /// From just before it was stopped until then.
    pub gap: Duration,
    /// When what was done.
    pub stages: Stages,
    /// Pages that were sent, each time.
    pub pages: u64,
    /// Bytes that were sent for them.
    pub bytes: u64,
    /// Bytes of device state.
    pub state_bytes: u64,
    /// Pages in each set that was written meanwhile.
    pub epochs: Vec<u64>,
    /// Pages that were sent when it ran there already.
    pub post_copy_pages: u64,
    /// Of those that were sent, how many went as the same as another.
    pub same_pages: u64,
    /// How many went as the words that differ from the version before.
    pub delta_pages: u64,
    /// What a GPU did.
    pub gpu: GpuUsed,
}

/// When each stage of a move was done, since the command began.
#[derive(Debug, Clone, Copy)]
pub struct Stages {
    /// The other host takes the guest.
    pub reached: Duration,
    /// Every page that stands still was sent.
    pub memory_sent: Duration,
    /// The guest was stopped.
    pub stopped: Duration,
    /// It ran there.
    pub runs_there: Duration,
}

/// Whether the guest is the other host's, as far as is known here.
pub(super) fn is_given(side: &SourceSide<'_>) -> bool {
    use SourceRecord::{Given, Gone, Serving};
    matches!(side.machine.record(), Some(Given | Serving | Gone))
}

/// A migration under way.
pub(super) struct Moving<'m> {
    pub began: Instant,
    pub reached: Duration,
    pub side: SourceSide<'m>,
    pub folder: &'m GuestFolder,
    pub pauses: &'m Pauses,
    pub reporter: &'m dyn Reporter,
}

/// Tells a step of the source's side. A guest that is given away nobody can put back any more: to end this command for
/// a pause that is too long would only leave it on no host.
pub(super) fn at_step(step: &str, pauses: &Pauses, reporter: &dyn Reporter) {
    if step == GIVEN {
        pauses.end();
    }
    reporter.reached(step);
}

/// Hands of a command that has the guest.
pub(super) trait LiveHands: Hands {
    /// How the guest is.
    fn health(&mut self) -> Health;
    /// Itself, for what needs no more: Rust 1.85 does not see that it is one.
    fn hands(&mut self) -> &mut dyn Hands;
}

impl Moving<'_> {
    /// Hears the destination until it is known on which side the guest is; says when it ran there, and how
    /// many pages it got then.
    pub fn hand_over(
        &mut self,
        hands: &mut dyn Hands,
        serving: &Serving<'_>,
    ) -> Result<(Instant, u64), Failure> {
        let mut runs_at = None;
        let pauses = self.pauses;
        let mut on_word = |word: FromDestination, hands: &mut dyn Hands| {
            match word {
                // A user that let it run until now is heard.
                FromDestination::Ready => hands.ensure_stopped()?,
                FromDestination::Partial | FromDestination::Running => {
                    runs_at.get_or_insert_with(Instant::now);
                    pauses.end();
                }
                FromDestination::Refused => {}
            }
            Ok(())
        };
        let sent = serving.until_decided(&mut self.side, hands, &mut on_word)?;
        match self.side.machine.record() {
            Some(SourceRecord::Gone) => Ok((runs_at.unwrap_or_else(Instant::now), sent)),
            _ => Err(Failure::new(Code::Failed, "the other host refused the guest")),
        }
    }

    /// Brings a migration that failed to its end: what is on disk decides.
    pub fn end(
        &mut self,
        hands: &mut dyn LiveHands,
        moved: Result<Migrated, Failure>,
    ) -> Result<Migrated, Failure> {
        let failure = match moved {
            Ok(moved) => return Ok(moved),
            Err(failure) => failure,
        };
        if self.side.machine.record() == Some(SourceRecord::Gone) {
            let (name, other) = (self.folder.name(), &self.side.record.other);
            return Err(failure
                .attention()
                .state(format!(
                    "'{name}' runs at {other}; not all that was left of it here is removed"
                ))
                .advice("'dewar ps' goes on with that"));
        }
        self.pauses.end_throttle();
        let back = self.side.begin_again(hands.hands());
        if is_given(&self.side) {
            let (name, other) = (self.folder.name(), &self.side.record.other);
            return Err(still_given(failure, name, other, self.side.machine.record()));
        }
        if let Err(failure) = hands.resume() {
            // What copied its disks is ended by the next command.
            self.reporter.warn(&failure.whole());
        }
        // That the guest stays.
        let _ = self.side.on(SourceEvent::LinkBack, hands.hands());
        self.pauses.end();
        let health = hands.health();
        let failure = failure.state(format!("the guest was not moved; {health}"));
        Err(match (back, health) {
            (Err(_), _) | (_, Health::Unknown(_)) => {
                failure.attention().advice("'dewar ps' tries to put it right")
            }
            (_, Health::Gone) => failure.attention().advice(GONE),
            _ => failure,
        })
    }
}
