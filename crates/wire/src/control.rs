//! Messages of the control connection, in JSON ([`Kind::Control`](crate::frame::Kind::Control)).
//!
//! ```text
//!  source                                destination
//!  Offer ->                                            may the guest come?
//!                       <- Accepted, or Declined
//!  Begin ->                                            the connections of pages are there
//!  pages, a barrier for each epoch ...
//!                       <- Arrived, for each epoch
//!  Stopped, then its device state ->                   the guest stands still
//!  Ownership ->         <- Ownership                   who runs it: see `ownership`
//! ```
//!
//! In a post-copy the set of pages that the source still has follows the device state, and pages come
//! on all connections while the rest is said:
//!
//! ```text
//!  Stopped, device state, set ->
//!                       <- Lacks, then the set         its memory is ready for them
//!  pages, on their connections ->
//!                       <- Wants, any number of times  a page is touched
//!  those pages, here ->
//! ```
//!
//! A connection that asks about an earlier migration begins with [`ToDestination::Resume`] or
//! [`ToDestination::GiveUp`] in place of the offer.

use crate::ownership::{FromDestination, FromSource};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The number of the control connection; those of pages count from 0.
pub const CONTROL: u16 = u16::MAX;
/// The number of the connection of the first disk that is copied; those of the others follow.
pub const FIRST_DISK: u16 = 0x8000;
/// Disks that are copied, at most.
pub const MOST_DISKS: u16 = 16;
/// Most bytes of device state.
pub const MOST_STATE_BYTES: u64 = 1 << 30;
/// Bytes of device state in a frame.
pub const STATE_FRAME_BYTES: usize = 1 << 20;

/// A file of a guest's RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// The hypervisor's name for it.
    pub name: String,
    /// Its size, whole pages.
    pub bytes: u64,
}

/// A guest that is to come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Its name.
    pub guest: String,
    /// Where it is now, in words for people.
    pub from: String,
    /// Tells the process that has it from all others. What is offered anew was not given away: an
    /// earlier migration of it can be refused.
    pub instance: String,
    /// How to start it; the two sides' business.
    pub machine: Value,
    /// Its RAM, in the order of its pages.
    pub regions: Vec<Region>,
    /// On how many connections of their own pages may come.
    pub connections: u16,
    /// The certificate of the source for these, DER in hexadecimal digits; without it there are none.
    pub certificate: Option<String>,
    /// Whether it may run before all of its memory has arrived.
    #[serde(default)]
    pub post_copy: bool,
    /// Whether it does not come: it is only to be known whether it could.
    #[serde(default)]
    pub trial: bool,
}

/// Where the destination listens for connections of pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    /// The port.
    pub port: u16,
    /// The address by which the source came here, if that is known.
    pub address: Option<String>,
    /// The destination's certificate, DER in hexadecimal digits.
    pub certificate: String,
}

/// A guest that stands still. The last epoch's pages and so many bytes of device state make it whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// The epoch that the destination must have.
    pub epoch: u32,
    /// Bytes of device state that follow.
    pub state_bytes: u64,
    /// In a post-copy, bytes of the set of pages that the source still has, behind the device state: a
    /// bit for each page of the guest, from the lowest bit of the first byte on.
    #[serde(default)]
    pub owed_bytes: u64,
    /// Whether it ran, and is to run.
    pub was_running: bool,
    /// What else is to be as it was; the two sides' business.
    pub machine: Value,
}

/// What the source says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToDestination {
    /// A guest is to come.
    Offer(Box<Offer>),
    /// Pages begin to come.
    Begin {
        /// Whether on connections of their own, which are there; or else beside these messages.
        direct: bool,
    },
    /// What became of the guest in the migration that the greeting names?
    Resume {
        /// The guest.
        guest: String,
    },
    /// The same; the destination is to refuse the guest, if it has not begun to run it.
    GiveUp {
        /// The guest.
        guest: String,
    },
    /// The guest stands still; frames of device state follow.
    Stopped(Box<Stopped>),
    /// Who runs the guest.
    Ownership(FromSource),
}

/// What the destination says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToSource {
    /// The guest may come.
    Accepted {
        /// Where its pages may go.
        listening: Option<Listening>,
    },
    /// It may not.
    Declined {
        /// A sentence.
        why: String,
    },
    /// All pages of an epoch are there.
    Arrived {
        /// Which.
        epoch: u32,
    },
    /// In a post-copy: so many bytes of the set of pages that are missing here follow. Each of them may be
    /// sent from now on, as it is.
    Lacks {
        /// How many bytes.
        bytes: u64,
    },
    /// The guest waits for these pages: they go before all others, beside these messages.
    Wants {
        /// Their numbers.
        pages: Vec<u64>,
    },
    /// Something failed; what follows says what becomes of the guest.
    Failed {
        /// A sentence.
        why: String,
    },
    /// Who runs the guest.
    Ownership(FromDestination),
}
