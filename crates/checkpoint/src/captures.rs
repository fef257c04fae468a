//! How dirty pages are captured while the guest runs, until what is left fits the
//! pause.

use crate::CheckpointError;
use crate::buffer::CaptureBuffer;
use crate::observe::{Observer, Step};
use crate::overflow::Overflow;
use crate::work::cores;
use dewar_guest::Guest;
use dewar_image::{EpochRecord, ImageWriter};
use dewar_memory::{DirtyLease, Ram, WriteTracker};
use dewar_units::{PAGE_BYTES, PageNumber, PageSet};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// What a pause costs before the first page is copied: stop, disk transaction,
/// device state, go on.
const FIXED_PAUSE: Duration = Duration::from_millis(14);
/// Epochs after which a guest that writes too fast is stopped anyway.
const MOST_EPOCHS: usize = 40;
/// How long a guest that stands still waits for a store that is away.
const STOPPED_PATIENCE: Duration = Duration::from_secs(2);
/// Epochs without a smaller dirty set after which waiting helps no more.
const STUBBORN_EPOCHS: usize = 4;
/// Epochs whose pages a lazy restore brings first.
const HOT_EPOCHS: usize = 4;
/// Pages for which the pause finds room, at least: setting it aside takes time too.
const LEAST_ASIDE: usize = 2048;
/// Most of such pages: the list is read before the guest runs.
const MOST_HOT: usize = 1 << 16;

/// What a capture has so far.
pub(crate) struct Captures<'t> {
    /// Every dirty set taken: a debt until the image exists.
    pub debt: Option<DirtyLease<'t>>,
    /// Copies of its pages.
    pub buffer: CaptureBuffer,
    /// Each epoch.
    pub epochs: Vec<EpochRecord>,
    /// The pages of the last epochs, those of the pause with the last one's.
    hot: VecDeque<PageSet>,
    /// Pages that the buffer had no room for, each time.
    pub overflowed: u64,
    /// Pages that went to the dirty store, each time they did.
    pub keyed: u64,
    /// Pages that were written before the pause and copied in it.
    pub stopped: u64,
    began: Instant,
    last_take: Instant,
}

impl<'t> Captures<'t> {
    /// An empty one; `debt` is what was taken to begin with.
    pub(crate) fn new(
        pages: u64,
        buffer_bytes: u64,
        began: Instant,
        debt: Option<DirtyLease<'t>>,
    ) -> Self {
        let limit = (buffer_bytes / PAGE_BYTES as u64).min(u64::from(u32::MAX - 1)) as usize;
        Self {
            debt,
            buffer: CaptureBuffer::new(pages, limit),
            epochs: Vec::new(),
            hot: VecDeque::from([PageSet::new(pages)]),
            overflowed: 0,
            keyed: 0,
            stopped: 0,
            began,
            last_take: began,
        }
    }

    /// Puts pages that the buffer has no room for.
    fn put_elsewhere(
        &mut self,
        left_over: &[PageNumber],
        ram: &Ram,
        overflow: &mut Overflow<'_, '_>,
    ) -> Result<(), CheckpointError> {
        let mut bytes = vec![0; PAGE_BYTES];
        for &page in left_over {
            self.overflowed += 1;
            ram.copy_page(page, &mut bytes);
            self.keyed += u64::from(overflow.put(page, &bytes)?);
        }
        Ok(())
    }

    /// Captures a set that was taken.
    fn capture(
        &mut self,
        lease: DirtyLease<'t>,
        ram: &Ram,
        writer: &ImageWriter<'_>,
        overflow: &mut Overflow<'_, '_>,
    ) -> Result<(), CheckpointError> {
        writer.expect(lease.pages());
        let left_over = self.buffer.capture(ram, lease.pages(), cores());
        self.put_elsewhere(&left_over, ram, overflow)?;
        self.owe(lease);
        Ok(())
    }

    /// Takes a set over as a debt.
    pub(crate) fn owe(&mut self, lease: DirtyLease<'t>) {
        match &mut self.debt {
            Some(debt) => debt.absorb(lease),
            none => *none = Some(lease),
        }
    }

    /// Notes what an epoch found written.
    fn note_hot(&mut self, pages: &PageSet) {
        if self.hot.len() == HOT_EPOCHS {
            self.hot.pop_front();
        }
        self.hot.push_back(pages.clone());
    }

    /// The pages that were written last, the last epoch's first.
    pub(crate) fn hottest(&self) -> Vec<PageNumber> {
        let mut all = Vec::new();
        for (newer, epoch) in self.hot.iter().rev().enumerate() {
            let mut new = epoch.clone();
            self.hot.iter().rev().take(newer).for_each(|known| new.subtract(known));
            all.extend(new.iter());
        }
        all.truncate(MOST_HOT);
        all
    }

    /// Notes an epoch that began then.
    pub(crate) fn note(&mut self, began: Instant, dirty_pages: u64, observer: &dyn Observer) {
        self.last_take = began;
        let at_ms = (began - self.began).as_secs_f64() * 1e3;
        self.epochs.push(EpochRecord { at_ms, dirty_pages });
        observer.step(Step::Epoch { number: self.epochs.len(), dirty_pages });
    }

    /// Captures what was written, while the guest stands still.
    pub(crate) fn capture_stopped(
        &mut self,
        pages: &PageSet,
        ram: &Ram,
        writer: &ImageWriter<'_>,
    ) -> Result<(), CheckpointError> {
        if let Some(last) = self.hot.back_mut() {
            last.union_with(pages);
        }
        self.stopped = pages.count();
        writer.expect(pages);
        let left_over = self.buffer.capture_stopped(ram, pages, cores());
        if left_over.is_empty() {
            return Ok(());
        }
        // Not to the dirty store, and not for long to a store that is away.
        writer.set_patience(STOPPED_PATIENCE);
        let mut put = || -> Result<(), CheckpointError> {
            let mut overflow = Overflow::image(writer)?;
            self.put_elsewhere(&left_over, ram, &mut overflow)?;
            overflow.finish()
        };
        let done = put();
        writer.set_patience(Duration::MAX);
        done
    }
}

/// Runs epochs: take the dirty set, drain I/O, copy; each is shorter than the
/// last, as there is less to copy. Ends when the next dirty set would fit into
/// `max_pause`, or when it does not get smaller.
pub(crate) fn run<'t>(
    captures: &mut Captures<'t>,
    guest: &mut dyn Guest,
    tracker: &'t WriteTracker,
    writer: &ImageWriter<'_>,
    max_pause: Duration,
    observer: &dyn Observer,
) -> Result<(), CheckpointError> {
    let ram = guest.ram();
    let mut overflow = Overflow::new(writer)?;
    let mut smallest = u64::MAX;
    let mut stubborn = 0;
    let mut flushed = false;
    let before = captures.epochs.len();
    while captures.epochs.len() - before < MOST_EPOCHS {
        let began = Instant::now();
        let lease = tracker.take(cores())?;
        let scan = began.elapsed();
        let count = lease.pages().count();
        captures.note_hot(lease.pages());
        guest.drain()?;
        let copying = Instant::now();
        captures.capture(lease, &ram, writer, &mut overflow)?;
        overflow.flush()?;
        let copy = copying.elapsed();

        let since_last = began - captures.last_take;
        captures.note(began, count, observer);

        // As fast as the guest wrote since the last take, it writes during
        // this epoch: that is what the pause would have to copy.
        let rate = count as f64 / since_last.as_secs_f64().max(1e-4);
        let next = (rate * began.elapsed().as_secs_f64()).min(count as f64);
        let per_page = copy.as_secs_f64() / count.max(1000) as f64;
        let pause = FIXED_PAUSE + scan + Duration::from_secs_f64(per_page * next);
        let fits = pause <= max_pause;
        stubborn = if count < smallest - smallest / 10 { 0 } else { stubborn + 1 };
        smallest = smallest.min(count);
        // While the disks were flushed the set grew; it shrinks again.
        let is_small = count <= smallest + smallest / 4;
        if fits || stubborn >= STUBBORN_EPOCHS {
            if flushed && (is_small || stubborn >= STUBBORN_EPOCHS) {
                break;
            }
            if !flushed {
                // The pause must neither wait for the disk nor for fresh memory.
                captures.buffer.set_aside(2 * count as usize + LEAST_ASIDE);
                guest.flush()?;
                observer.step(Step::Flushed);
                flushed = true;
                stubborn = 0;
            }
        }
    }
    overflow.finish()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_pages_are_those_of_the_last_epochs_the_newest_first() {
        let mut captures = Captures::new(100, 1 << 20, Instant::now(), None);
        for pages in [&[90][..], &[50, 60], &[10, 50], &[20], &[10, 30]] {
            let mut set = PageSet::new(100);
            for page in pages {
                set.insert(PageNumber(*page));
            }
            captures.note_hot(&set);
        }
        let hottest: Vec<u64> = captures.hottest().iter().map(|page| page.0).collect();
        // 90 is of the fifth last.
        assert_eq!(hottest, [10, 30, 20, 50, 60]);
    }
}
