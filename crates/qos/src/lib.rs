//! Gives soft-real-time guests the CPU that their deadlines need: the guest says
//! how its jobs fare, and a law says how much CPU time it is promised in each
//! period. After Co-SEDF (Kim et al.), on Linux's own earliest-deadline-first
//! scheduler.
//!
//! - [`law`]: what was seen of a job in, the next reservation out. No clock, no
//!   system calls.
//! - [`Heartbeats`]: what the guest says, bounded.
//! - [`Reservations`]: threads under a reservation, and how they get out of it.
//! - [`Ledger`]: the CPU time that was promised to each guest; kept in files.
//! - [`Controller`]: the loop.
#![forbid(unsafe_code)]

mod cgroup_weight;
mod controller;
mod entry;
mod error;
mod heartbeats;
pub mod law;
mod ledger;
mod ledger_writer;
mod reservation;

pub use cgroup_weight::Group;
pub use controller::{Controller, Ended, LawKind, Subject, Target};
pub use entry::{BY_WEIGHT, Entry, Owner, Promise, SavedTask, Seen};
pub use error::QosError;
pub use heartbeats::{Heartbeats, Port};
pub use ledger::{Ledger, limit_of};
pub use reservation::{Mechanism, Reservations, end_rescues, release};
