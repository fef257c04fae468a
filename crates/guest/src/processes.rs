//! Guests that are made of processes: containers.

use crate::{GuestError, Health};
use dewar_memory::Ram;
use std::path::PathBuf;
use std::time::Instant;

/// A guest that is made of processes of the host. Its memory is in no file of ours: it is copied, while the
/// guest runs as far as that goes, and the rest while it stands still.
///
/// The order of a capture is [`copy_running`] at will, [`stop`], [`resume`], [`saved`]. After a failure anywhere, and whenever the caller
/// gives up, [`rollback`] lets the guest run; it may be called at any point and twice.
///
/// [`copy_running`]: ProcessGuest::copy_running
/// [`stop`]: ProcessGuest::stop
/// [`resume`]: ProcessGuest::resume
/// [`saved`]: ProcessGuest::saved
/// [`rollback`]: ProcessGuest::rollback
pub trait ProcessGuest {
    /// Its name.
    fn name(&self) -> &str;

    /// Copies the pages of its memory that were written since the last call, or all at the first, while it
    /// runs. Returns how many pages that were; `None` where it cannot be done so.
    ///
    /// # Errors
    /// Where there is no room for the copies.
    fn copy_running(&mut self) -> Result<Option<u64>, GuestError>;

    /// Stops it, saves what it is, and copies what is not copied of its memory. Returns when it stood still.
    ///
    /// # Errors
    /// Where it cannot be saved.
    fn stop(&mut self) -> Result<Instant, GuestError>;

    /// Lets it run again.
    ///
    /// # Errors
    /// Where it does not, or ran in the middle of all: what was captured is not of one instant.
    fn resume(&mut self) -> Result<(), GuestError>;

    /// What was captured.
    ///
    /// # Errors
    /// Where that cannot be read.
    fn saved(&mut self) -> Result<SavedProcesses, GuestError>;

    /// Lets it run, whatever was done with it.
    fn rollback(&mut self);

    /// Whether it runs, as far as can be told; for error messages.
    fn health(&mut self) -> Health;
}

/// What a guest that is made of processes was at one instant.
#[derive(Debug)]
pub struct SavedProcesses {
    /// The pages of its memory, copied.
    pub memory: Ram,
    /// How many of its pages were copied while it stood still.
    pub stopped_pages: u64,
    /// All else of the processes.
    pub state: Vec<u8>,
    /// What they wrote to files, as archives.
    pub files: Vec<SavedFiles>,
}

/// Files of a guest that is made of processes, as an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedFiles {
    /// What of the guest they are.
    pub name: String,
    /// The archive.
    pub archive: PathBuf,
}
