//! What a command is told while it works.

use dewar_checkpoint::Observer;

/// Hears how far a command is. For people a progress bar; for tests a way to be at a step exactly.
pub trait Reporter: Observer {
    /// A stage begins; its name is for people.
    fn stage(&self, name: &str);

    /// A step is reached of which only tests want to know.
    fn reached(&self, step: &str);

    /// Something is not as it should be, and the command goes on.
    fn warn(&self, what: &str);
}
