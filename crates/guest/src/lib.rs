//! The two kinds of guest that capabilities drive: [`Guest`], a virtual machine, and [`ProcessGuest`], a
//! container.
//!
//! A capability such as live checkpointing drives a [`Guest`] through one
//! fixed order of calls (see [`Guest`]) and knows nothing of hypervisors.
#![forbid(unsafe_code)]

mod processes;

pub use processes::{ProcessGuest, SavedFiles, SavedProcesses};

use dewar_memory::{KernelError, ProcessHandle, Ram, UffdOrigin};
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

/// A running guest whose state can be captured.
///
/// The order of a capture is: [`prepare`], ([`drain`] at will), [`flush`],
/// [`begin_pause`], [`stop`], [`save_state`], [`resume`], [`copy_disks`], [`finish`]. After a
/// failure anywhere, and whenever the caller gives up, [`rollback`] makes the
/// guest run as it was configured; it may be called at any point and twice.
///
/// [`prepare`]: Guest::prepare
/// [`drain`]: Guest::drain
/// [`flush`]: Guest::flush
/// [`begin_pause`]: Guest::begin_pause
/// [`stop`]: Guest::stop
/// [`save_state`]: Guest::save_state
/// [`resume`]: Guest::resume
/// [`copy_disks`]: Guest::copy_disks
/// [`finish`]: Guest::finish
/// [`rollback`]: Guest::rollback
pub trait Guest {
    /// Its name.
    fn name(&self) -> &str;

    /// Its process.
    fn process(&self) -> &ProcessHandle;

    /// Its RAM.
    fn ram(&self) -> Arc<Ram>;

    /// How its process may make a userfaultfd.
    ///
    /// # Errors
    /// Where it cannot be given the right to.
    fn uffd_origin(&mut self) -> Result<UffdOrigin, GuestError>;

    /// Makes ready whatever can be made ready before the pause.
    ///
    /// # Errors
    /// Where the guest cannot be captured.
    fn prepare(&mut self, tracking: DiskTracking) -> Result<(), GuestError>;

    /// Waits until the I/O that the guest has in flight now has landed in its
    /// memory.
    ///
    /// # Errors
    /// Where the guest does not answer.
    fn drain(&mut self) -> Result<(), GuestError>;

    /// Writes back what the host caches of the guest's disks, so that the
    /// pause need not.
    ///
    /// # Errors
    /// Where a disk cannot be written.
    fn flush(&mut self) -> Result<(), GuestError>;

    /// What can be done of the pause while the guest still runs; it is stopped next.
    ///
    /// # Errors
    /// Where its state cannot be saved, or somebody stopped it, or let it run, since
    /// [`Guest::prepare`].
    fn begin_pause(&mut self) -> Result<(), GuestError>;

    /// Stops the guest. From here on its memory does not change.
    ///
    /// # Errors
    /// Where it does not stop.
    fn stop(&mut self) -> Result<(), GuestError>;

    /// Freezes the disks as they are and returns the device state; the guest
    /// is stopped.
    ///
    /// # Errors
    /// Where the state cannot be saved.
    fn save_state(&mut self) -> Result<Vec<u8>, GuestError>;

    /// Lets the guest run again, if it ran before.
    ///
    /// # Errors
    /// Where it does not start, or somebody let it run since [`Guest::stop`]: then
    /// what was captured is not of one instant.
    fn resume(&mut self) -> Result<(), GuestError>;

    /// Copies each disk, as it was frozen, to the place that `place` names for
    /// it, while the guest runs. `place` is told whether it is known what was
    /// written since the earlier pause, and may then want no more than that.
    ///
    /// # Errors
    /// Where a disk cannot be read or the copy cannot be written.
    fn copy_disks(
        &mut self,
        place: &mut dyn FnMut(usize, &DiskInfo, bool) -> Result<DiskPlace, GuestError>,
    ) -> Result<Vec<DiskCopy>, GuestError>;

    /// Makes the guest's own disk files current again and ends the capture.
    ///
    /// # Errors
    /// Where a disk cannot be made current; the guest runs on.
    fn finish(&mut self) -> Result<(), GuestError>;

    /// Puts the guest back as it was before [`Guest::prepare`].
    ///
    /// # Errors
    /// Where it needs attention.
    fn rollback(&mut self) -> Result<(), GuestError>;

    /// Whether it runs, as far as can be told; for error messages.
    fn health(&mut self) -> Health;
}

/// A disk that the guest can write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskInfo {
    /// The hypervisor's name for it.
    pub name: String,
    /// The size that the guest sees, in bytes.
    pub virtual_bytes: u64,
}

/// From which pauses on writes to disks are tracked, each named by the image
/// that was taken in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskTracking {
    /// The pause that comes.
    pub begin: String,
    /// An earlier one.
    pub since: Option<String>,
}

/// Where a copy of a disk shall go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlace {
    /// The file to make.
    pub path: PathBuf,
    /// The file in the same folder that it stands on: then only what was
    /// written since the earlier pause is copied.
    pub below: Option<String>,
}

/// A finished copy of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskCopy {
    /// Which disk.
    pub disk: DiskInfo,
    /// Where the copy is.
    pub path: PathBuf,
    /// The format that it has.
    pub format: String,
}

/// How a guest is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// It runs.
    Running,
    /// It is stopped, as it was found.
    Paused,
    /// It does not run, for a reason of its own or its user's: a sentence.
    Stands(String),
    /// It ran, and stands still since a disk of it could not be written.
    IoStalled,
    /// Its process has ended.
    Gone,
    /// It powered itself off, and its process has ended.
    ShutDown,
    /// It does not answer, or is not as it was found.
    Unknown(String),
}

impl std::fmt::Display for Health {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Running => write!(f, "the guest is running"),
            Self::Paused => write!(f, "the guest is paused, as it was before"),
            Self::Stands(how) => f.write_str(how),
            Self::IoStalled => write!(
                f,
                "the guest stands still: a disk of it could not be written; make room there, \
                 then let it run on (QMP 'cont')"
            ),
            Self::Gone => write!(f, "the guest's process has ended"),
            Self::ShutDown => write!(f, "the guest powered itself off meanwhile"),
            Self::Unknown(why) => write!(f, "the guest needs attention: {why}"),
        }
    }
}

/// Something that a guest could not do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// This guest, or this host, lacks what is needed; nothing was touched.
    #[error("{guest} cannot be handled: {}", reasons.join("; "))]
    Unsupported {
        /// Which guest.
        guest: String,
        /// Each thing that is missing.
        reasons: Vec<String>,
    },
    /// The guest's process ended.
    #[error("the process of {guest} ended while {operation}")]
    Ended {
        /// Which guest.
        guest: String,
        /// What was being done.
        operation: String,
    },
    /// An operation failed.
    #[error("{operation} of {guest} failed: {cause}")]
    Failed {
        /// What was being done.
        operation: String,
        /// To which guest.
        guest: String,
        /// Why.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl GuestError {
    /// That an operation (a verb with -ing) of a guest failed, and why.
    pub fn failed(
        operation: &str,
        guest: &str,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        let (operation, guest) = (operation.to_owned(), guest.to_owned());
        Self::Failed { operation, guest, cause: cause.into() }
    }
}
