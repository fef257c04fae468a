//! Containers: what is done with a guest that is one.
//!
//! The runtime that started the container stays its owner: it is asked for its state, and it saves, restores and
//! removes it.

mod adopt;
pub(crate) mod arriving;
mod checkpoint;
mod guest;
pub(crate) mod leaving;
mod restore;
mod root;
mod warming;

pub use adopt::adopt;
pub use checkpoint::{ContainerCheckpoint, take};
pub use dewar_guest_oci::run_if_started_as_another;
pub(crate) use guest::ContainerGuest;
pub use restore::{ContainerRestore, restore};
pub(crate) use warming::Warming;

use crate::failure::{Code, Failure};
use dewar_guest_oci::{Container, Preconditions};
use dewar_registry::GuestRecord;

/// What keeps a container from being saved.
///
/// # Errors
/// Where it is none, or cannot be looked at.
pub fn preconditions(record: &GuestRecord) -> Result<Preconditions, Failure> {
    let known = record.container.as_ref().ok_or_else(|| {
        Failure::new(Code::Usage, format!("'{}' is a virtual machine", record.name))
    })?;
    let looked = Preconditions::of(&Container::of(known));
    looked.map_err(|error| Failure::from(error).state("the container was not touched"))
}
