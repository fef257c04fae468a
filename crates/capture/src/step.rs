//! Where a capture has come to.

use std::time::Duration;

/// A step of a capture, whatever its pages go into. It is reported when it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaptureStep {
    /// Overlays and settings are in place.
    Prepared,
    /// Every write is recorded from now on.
    Armed,
    /// A set of dirty pages was captured.
    Epoch {
        /// Which, from 1.
        number: usize,
        /// How many pages.
        dirty_pages: u64,
        /// How long the pause would be now, where that is known.
        pause: Option<Duration>,
    },
    /// The disks were written back.
    Flushed,
    /// Everything is ready; the guest is stopped next.
    Stopping,
    /// The guest stands still.
    Stopped,
    /// Disks are frozen and the device state is saved.
    StateSaved,
    /// The last pages are captured.
    Captured,
    /// The guest runs again.
    Resumed,
    /// It was to be captured and was not; it was put back.
    PutBack,
}

impl CaptureStep {
    /// Its name, in words joined by dashes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prepared => "prepared",
            Self::Armed => "armed",
            Self::Epoch { .. } => "epoch",
            Self::Flushed => "flushed",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::StateSaved => "state-saved",
            Self::Captured => "captured",
            Self::Resumed => "resumed",
            Self::PutBack => "put-back",
        }
    }
}
