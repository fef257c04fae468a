//! What a command is told while it works.

use dewar_checkpoint::Observer;
use std::time::Duration;

/// How fast a guest's memory goes to another host.
#[derive(Debug, Clone, Copy)]
pub struct Flow {
    /// Bytes a second over the link.
    pub link_bytes_per_second: f64,
    /// Bytes of memory a second: more, where pages are compressed or need not be sent.
    pub memory_bytes_per_second: f64,
    /// Until every page was looked at, and sent unless it is written.
    pub left: Duration,
}

/// Hears how far a command is. For people a progress bar; for tests a way to be at a step exactly.
pub trait Reporter: Observer {
    /// Itself, for what hears of a capture alone: Rust 1.85 does not see that it is one.
    fn observer(&self) -> &dyn Observer;

    /// A stage begins; its name is for people.
    fn stage(&self, name: &str);

    /// A step is reached of which only tests want to know.
    fn reached(&self, step: &str);

    /// How fast a guest's memory goes to another host.
    fn flow(&self, flow: &Flow);

    /// If the guest were stopped now: how long it would stand still, and for how many pages.
    fn predicted(&self, pause: Duration, pages: u64);

    /// Something is not as it should be, and the command goes on.
    fn warn(&self, what: &str);
}
