/// Where a checkpoint has come to. A step is told of when it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Overlays and settings are in place.
    Prepared,
    /// Every write is recorded from now on.
    Armed,
    /// The image has a writer.
    Begun,
    /// All pages that stood still are encoded.
    BulkDone,
    /// A set of dirty pages was captured.
    Epoch {
        /// Which, from 1.
        number: usize,
        /// How many pages.
        dirty_pages: u64,
    },
    /// The disks were written back.
    Flushed,
    /// The guest stands still.
    Stopped,
    /// Disks are frozen and the device state is saved.
    StateSaved,
    /// The last pages are captured.
    Captured,
    /// The guest runs again.
    Resumed,
    /// What was captured is encoded.
    WrittenBehind,
    /// The disks are copied.
    DisksCopied,
    /// The guest's own disk files are current again.
    Settled,
    /// Everything but the record is on disk.
    Synced,
    /// The image exists.
    Committed,
}

impl Step {
    /// Its name, in words joined by dashes.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Prepared => "prepared",
            Self::Armed => "armed",
            Self::Begun => "begun",
            Self::BulkDone => "bulk-done",
            Self::Epoch { .. } => "epoch",
            Self::Flushed => "flushed",
            Self::Stopped => "stopped",
            Self::StateSaved => "state-saved",
            Self::Captured => "captured",
            Self::Resumed => "resumed",
            Self::WrittenBehind => "written-behind",
            Self::DisksCopied => "disks-copied",
            Self::Settled => "settled",
            Self::Synced => "synced",
            Self::Committed => "committed",
        }
    }
}

/// Who wants to know how far things are.
pub trait Observer: Sync {
    /// A step is done.
    fn step(&self, step: Step);

    /// The present stage has done `done` of `of` pages.
    fn progress(&self, done: u64, of: u64);
}
