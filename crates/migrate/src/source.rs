//! The source's way to send memory: a pass over the pages that stand still, then dirty sets, each an
//! epoch that the destination says has arrived.
//!
//! A dirty set is a debt until its epoch has arrived: dropped before, its pages are dirty again.

use crate::MigrateError;
use crate::feeder::PageFeeder;
use crate::send::PageSender;
use crate::sent::{Copied, Paused, SentMemory, Tracked};
use dewar_capture::{DirtySink, PIECE, Pieces, StandingPages, cores};
use dewar_memory::{DirtyLease, Ram, WriteTracker};
use dewar_units::{PageNumber, PageRange, PageSet};
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages of a set in which a GPU may be used.
const LEAST_FOR_A_GPU: u64 = 1 << 16;

/// A guest's memory on its way over the wire.
pub struct Precopy<'p> {
    ram: &'p Ram,
    /// Without it these are copies, which stand still while they are sent.
    tracker: Option<&'p WriteTracker>,
    sender: &'p PageSender,
    /// Waits until an epoch has arrived at the other side.
    arrived: &'p dyn Fn(u32) -> Result<(), MigrateError>,
    epoch: u32,
    pages: u64,
}

impl<'p> Precopy<'p> {
    /// Nothing is sent yet. Writes must be recorded already.
    pub fn new(
        ram: &'p Ram,
        tracker: &'p WriteTracker,
        sender: &'p PageSender,
        arrived: &'p dyn Fn(u32) -> Result<(), MigrateError>,
    ) -> Self {
        Self { ram, tracker: Some(tracker), sender, arrived, epoch: 0, pages: 0 }
    }

    /// The same of copies of a guest's memory: nothing writes them while they are sent.
    pub fn of_copies(
        ram: &'p Ram,
        sender: &'p PageSender,
        arrived: &'p dyn Fn(u32) -> Result<(), MigrateError>,
    ) -> Self {
        Self { ram, tracker: None, sender, arrived, epoch: 0, pages: 0 }
    }

    /// The last epoch.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// How many pages were sent, each time.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Sends every page that stands still, but those that were never written: the destination's memory
    /// begins as zeros. `progress` is told how many pages of all were
    /// looked at.
    ///
    /// # Errors
    /// Where memory cannot be read or sent.
    pub fn send_standing(&mut self, progress: &(dyn Fn(u64) + Sync)) -> Result<(), MigrateError> {
        let all = PageSet::full(self.ram.pages());
        let Some(tracker) = self.tracker else { return self.send(&all) };
        let standing = StandingPages::new(self.ram, &all)?;
        let (done, sent) = (AtomicU64::new(0), AtomicU64::new(0));
        let memory = Tracked { ram: self.ram, tracker, is_first: true };
        let work = || -> Result<(), MigrateError> {
            let mut feeder = PageFeeder::new(self.sender, self.ram, &memory).with_gpu();
            while let Some(piece) = standing.pieces().take() {
                let (pages, _) = standing.of(piece, tracker, |_| true)?;
                pages.iter().try_for_each(|page| feeder.put(*page))?;
                sent.fetch_add(pages.len() as u64, Ordering::Relaxed);
                progress(done.fetch_add(piece.count(), Ordering::Relaxed) + piece.count());
            }
            feeder.flush()
        };
        on_threads(cores(), || work().inspect_err(|_| standing.pieces().stop()))?;
        self.pages += sent.into_inner();
        self.end_epoch()?;
        (self.arrived)(self.epoch)
    }

    /// Sends pages that were taken from the tracker, or copied, as they are now, as an epoch of their own, and waits until
    /// they have arrived.
    ///
    /// # Errors
    /// Where they cannot be sent, or do not arrive.
    pub fn send(&mut self, pages: &PageSet) -> Result<(), MigrateError> {
        // To open it is worth a set that is long.
        let is_gpu_welcome = pages.count() >= LEAST_FOR_A_GPU;
        match self.tracker {
            Some(tracker) => {
                let memory = Tracked { ram: self.ram, tracker, is_first: false };
                self.send_set(pages, &memory, is_gpu_welcome)?;
            }
            None => {
                let memory = Copied { ram: self.ram, is_first: self.epoch == 0 };
                self.send_set(pages, &memory, is_gpu_welcome)?;
            }
        }
        (self.arrived)(self.epoch)
    }

    /// Sends the last pages of a guest that stands still, and does not wait: the destination waits for the
    /// last epoch by itself.
    ///
    /// # Errors
    /// Where they cannot be sent.
    pub fn send_last(&mut self, pages: &PageSet) -> Result<(), MigrateError> {
        // What a GPU or its driver is busy with would keep the guest waiting.
        self.send_set(pages, &Paused(self.ram), false)
    }

    fn send_set(
        &mut self,
        pages: &PageSet,
        memory: &dyn SentMemory,
        is_gpu_welcome: bool,
    ) -> Result<(), MigrateError> {
        let pages: Vec<PageNumber> = pages.iter().collect();
        let pieces = Pieces::new(PageRange::new(0, pages.len() as u64), PIECE);
        let work = || -> Result<(), MigrateError> {
            let mut feeder = PageFeeder::new(self.sender, self.ram, memory);
            if is_gpu_welcome {
                feeder = feeder.with_gpu();
            }
            while let Some(piece) = pieces.take() {
                let pages = &pages[piece.start.index()..piece.end.index()];
                pages.iter().try_for_each(|page| feeder.put(*page))?;
            }
            feeder.flush()
        };
        let threads = cores().min(pages.len().div_ceil(PIECE as usize));
        on_threads(threads, || work().inspect_err(|_| pieces.stop()))?;
        self.pages += pages.len() as u64;
        self.end_epoch()
    }

    fn end_epoch(&mut self) -> Result<(), MigrateError> {
        self.epoch += 1;
        self.sender.end_epoch(self.epoch)
    }
}

impl<'t> DirtySink<'t> for Precopy<'_> {
    type Error = MigrateError;

    fn capture(&mut self, lease: DirtyLease<'t>) -> Result<(), MigrateError> {
        self.send(lease.pages())?;
        lease.commit();
        Ok(())
    }

    fn make_room(&mut self, _dirty_pages: u64) {}
}

/// Does the work on so many threads; the first error counts.
fn on_threads(
    threads: usize,
    work: impl Fn() -> Result<(), MigrateError> + Sync,
) -> Result<(), MigrateError> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(&work)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).fold(Ok(()), Result::and)
    })
}
