//! What the stages of a capture share.

use crate::allowance::Allowance;
use crate::observe::Observer;
use dewar_capture::Workers;
use dewar_image::ImageWriter;
use dewar_memory::{Ram, WriteTracker};

/// What the stages of a capture work on, and with.
pub(crate) struct CaptureContext<'c, 't> {
    /// The guest's memory.
    pub ram: &'c Ram,
    /// Where writes to it are recorded.
    pub tracker: &'t WriteTracker,
    /// Where its pages go.
    pub writer: &'c ImageWriter<'c>,
    /// The threads that work at idle priority.
    pub workers: &'c Workers,
    /// How much of what stands still the dirty store takes, too.
    pub allowance: &'c Allowance,
    /// Is told how far the capture is.
    pub observer: &'c dyn Observer,
}
