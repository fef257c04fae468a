use dewar_capture::CaptureStep;
use dewar_image::StageRecord;
use std::sync::Mutex;
use std::time::Instant;

/// Where a checkpoint has come to. A step is reported when it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The image has a writer.
    Begun,
    /// All pages that stood still are encoded.
    BulkDone,
    /// A step that every capture has.
    Capture(CaptureStep),
    /// What was captured is encoded.
    WrittenBehind,
    /// The disks are copied.
    DisksCopied,
    /// The guest's own disk files are current again.
    DisksCurrent,
    /// Everything but the record is on disk.
    Synced,
    /// The image exists.
    Committed,
}

impl Step {
    /// Its name, in words joined by dashes.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Begun => "begun",
            Self::BulkDone => "bulk-done",
            Self::Capture(step) => step.name(),
            Self::WrittenBehind => "written-behind",
            Self::DisksCopied => "disks-copied",
            Self::DisksCurrent => "disks-current",
            Self::Synced => "synced",
            Self::Committed => "committed",
        }
    }
}

/// Is told how far a checkpoint or a restore is.
pub trait Observer: Sync {
    /// A step is done.
    fn step(&self, step: Step);

    /// The present stage has done `done` of `of` pages.
    fn progress(&self, done: u64, of: u64);
}

/// Passes everything on and notes when each step was done.
pub(crate) struct Timeline<'o> {
    observer: &'o dyn Observer,
    began: Instant,
    stages: Mutex<Vec<StageRecord>>,
}

impl<'o> Timeline<'o> {
    pub(crate) fn new(observer: &'o dyn Observer, began: Instant) -> Self {
        Self { observer, began, stages: Mutex::default() }
    }

    pub(crate) fn stages(&self) -> Vec<StageRecord> {
        self.stages.lock().unwrap_or_else(|locked| locked.into_inner()).clone()
    }
}

impl Observer for Timeline<'_> {
    fn step(&self, step: Step) {
        let at_ms = self.began.elapsed().as_secs_f64() * 1e3;
        let stage = StageRecord { step: step.name().to_owned(), at_ms };
        self.stages.lock().unwrap_or_else(|locked| locked.into_inner()).push(stage);
        self.observer.step(step);
    }

    fn progress(&self, done: u64, of: u64) {
        self.observer.progress(done, of);
    }
}
