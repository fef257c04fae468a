//! Which of two hosts runs a guest that moves: never both, whatever is killed and whichever message is lost.
//!
//! Each side is a state machine without sockets, clocks or files. It is given an [event](SourceEvent) and
//! answers with actions, which the caller carries out in order. [`SourceAction::Record`] and
//! [`DestinationAction::Record`] mean *written and fsynced* before the next action; of a guest that was never
//! loaded no record means the same as [`DestinationRecord::Refused`], and none need be written. **If an action fails,
//! the caller carries out nothing more, drops the value and begins again with what is on disk**
//! ([`Source::recover`], [`Destination::recover`]), as after a kill.
//!
//! ```text
//!  source                                     destination
//!  (nothing)  the guest runs here             (nothing)
//!  Intent     before it is stopped
//!                                   <- Ready  Loaded    its state is loaded, it stands still
//!  Given      this side does not run it
//!             Commit ->                       Owned     it is about to run here
//!                                 <- Running  Running   it was let run
//!  Gone       its memory is given up
//!             Gone ->                         (nothing)
//! ```
//!
//! In a **post-copy** the guest runs at the destination while part of its memory is still at the source:
//!
//! ```text
//!             Commit ->                       Owned
//!                                 <- Partial  Partial   it was let run, and waits for memory
//!  Serving    it runs there; its memory is
//!             kept and served
//!                                 <- Running  Running   all of its memory is there
//!  Gone       its memory is given up
//! ```
//!
//! **The rule**: the source runs the guest until it has recorded `Given`, the destination from the moment on
//! in which it has recorded `Owned`, and it records that only after a `Commit`, which is sent only after
//! `Given`. So never both.
//!
//! **The way back.** A destination that is `Loaded`, or knows nothing of the guest, may *refuse*, which is
//! recorded as well: after `Refused` it never answers a `Commit` in any other way. A source that is `Given`
//! and hears `Refused` records `TakenBack` and goes on with the guest.
//!
//! **What may be forgotten.** A record goes only when an action says so ([`DestinationAction::Forget`],
//! `Record(None)`): the other side has then said that it will not ask again. Who asks about a guest of which
//! nothing is on record is answered all the same: a source without a record does not have the guest, a
//! destination without one never will.
//!
//! **What is not possible.** If the link is gone for good between `Given` and `Running`, neither side can know
//! of the other (the two generals' problem). Then neither runs the guest until the link is back or a person
//! decides: at the destination by refusing, at the source by taking back, of which the person must be sure
//! that the other host will never run it ([`SourceEvent::TakeBack`]). The same holds where the destination's
//! QEMU ended between `Owned` and `Running`: whether the guest ran in it is not known, so the destination is
//! silent, and the source keeps all of the guest. A guest that is `Partial` is never taken back: it ran on,
//! and changed its disks.
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
    /// The guest stays where it is; the source will not commit any more.
    Abort,
    /// The source knows that the guest runs at the destination, and has nothing of it any more.
    Gone,
}

/// What the destination says of it. Sent again it means the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FromDestination {
    /// All is loaded; one word and it runs.
    Ready,
    /// It was let run here, and part of its memory is still the source's.
    Partial,
    /// It was let run here, and needs nothing from the source any more.
    Running,
    /// It was not let run here and never will be.
    Refused,
}
