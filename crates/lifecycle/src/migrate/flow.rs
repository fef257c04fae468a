//! How fast a migration goes, for people who watch.

use crate::reporter::{Flow, Reporter};
use dewar_migrate::PageSender;
use dewar_units::PAGE_BYTES;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often it is said.
const INTERVAL: Duration = Duration::from_millis(200);

/// Tells a reporter how fast a pass over all pages goes.
pub(super) struct FlowMeter<'f> {
    reporter: &'f dyn Reporter,
    sender: &'f PageSender,
    pages: u64,
    began: Instant,
    reported_at: Mutex<Instant>,
}

impl<'f> FlowMeter<'f> {
    pub(super) fn start(reporter: &'f dyn Reporter, sender: &'f PageSender, pages: u64) -> Self {
        let began = Instant::now();
        Self { reporter, sender, pages, began, reported_at: Mutex::new(began) }
    }

    /// So many pages were looked at.
    pub(super) fn progress(&self, done: u64) {
        self.reporter.progress(done, self.pages);
        let now = Instant::now();
        {
            let mut reported_at = self.reported_at.lock().unwrap_or_else(PoisonError::into_inner);
            if now - *reported_at < INTERVAL {
                return;
            }
            *reported_at = now;
        }
        let seconds = (now - self.began).as_secs_f64();
        let memory_bytes_per_second = (done * PAGE_BYTES as u64) as f64 / seconds;
        let left = (self.pages.saturating_sub(done) * PAGE_BYTES as u64) as f64;
        self.reporter.flow(&Flow {
            link_bytes_per_second: self.sender.bytes() as f64 / seconds,
            memory_bytes_per_second,
            left: Duration::try_from_secs_f64(left / memory_bytes_per_second)
                .unwrap_or(Duration::MAX),
        });
    }
}
