//! Which of two hosts runs a guest that moves: exactly one, whatever is killed and whichever message is lost.
//!
//! Each side is a state machine without sockets, clocks or files. It is given an [event](SourceEvent) and
//! answers with actions, which the caller carries out in order; [`SourceAction::Record`] and
//! [`DestinationAction::Record`] mean *written and fsynced* before the next one. A side that was killed
//! begins again with what it recorded last.
//!
//! ```text
//!  source                                     destination
//!  (nothing)  the guest runs here             (nothing)
//!  Intent     before it is stopped
//!                                   <- Ready  Loaded    its state is loaded, it stands still
//!  Given      it never runs here again
//!             Commit ->                       Owned     it runs here, whatever happens
//!                                 <- Running
//!  Gone       its memory is given up
//! ```
//!
//! **The rule**: the source runs the guest until it has recorded `Given`, the destination from the moment on
//! in which it has recorded `Owned`, and it records that only after a `Commit`, which is sent only after
//! `Given`. So never both.
//!
//! **The way back.** A destination that is `Loaded`, or knows nothing of the guest, may *refuse*, which is
//! recorded as well: after `Refused` it never answers a `Commit` in any other way. A source that is `Given`
//! and hears `Refused` records `TakenBack` and runs the guest again.
//!
//! **What is not possible.** If the link is gone for good between `Given` and `Running`, neither side can know
//! of the other (the two generals' problem). Then neither runs the guest until the link is back or a person
//! decides: at the destination by refusing, at the source by taking back, of which the person must be sure
//! that the other host will never run it ([`SourceEvent::TakeBack`]).
//!
//! `tests/ownership.rs` walks through every order of events, deliveries, losses and kills.

mod destination;
mod source;

pub use destination::{Destination, DestinationAction, DestinationEvent, DestinationRecord};
pub use source::{Source, SourceAction, SourceEvent, SourceRecord};

use serde::{Deserialize, Serialize};

/// What the source says of who runs the guest. Sent again it means the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FromSource {
    /// The guest is the destination's.
    Commit,
    /// The guest stays where it is; nothing of this migration is needed any more.
    Abort,
}

/// What the destination says of it. Sent again it means the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FromDestination {
    /// All is loaded; one word and it runs.
    Ready,
    /// It runs here.
    Running,
    /// It does not run here and never will.
    Refused,
}
