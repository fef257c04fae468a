//! Containers: what is done with a guest that is one.
//!
//! The runtime that started the container stays its owner: it is asked for its state, and it saves, restores and
//! removes it.

mod adopt;
mod checkpoint;
mod guest;
mod restore;
mod root;

pub use adopt::adopt;
pub use checkpoint::{ContainerCheckpoint, take};
pub use restore::{ContainerRestore, restore};
