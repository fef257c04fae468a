//! How dirty pages are captured while the guest runs, until what is left fits the pause.

use crate::epochs::Epochs;
use crate::step::CaptureStep;
use crate::workers::cores;
use dewar_guest::{Guest, GuestError};
use dewar_memory::{DirtyLease, KernelError, WriteTracker};
use std::time::{Duration, Instant};

/// What a pause costs before the first page is copied: stop, disk transaction,
/// device state, go on.
const FIXED_PAUSE: Duration = Duration::from_millis(14);
/// Epochs after which a guest that writes too fast is stopped anyway.
const MOST_EPOCHS: usize = 40;
/// Epochs without a smaller dirty set after which waiting helps no more.
const STUBBORN_EPOCHS: usize = 4;

/// What came of waiting for a pause that is short enough.
#[derive(Debug, Clone, Copy)]
pub struct Convergence {
    /// Whether what is left fits the pause.
    pub fits: bool,
    /// How long the pause will be.
    pub pause: Duration,
    /// So many pages were written in the last epoch.
    pub dirty_pages: u64,
}

/// Where the pages of dirty sets go.
pub trait DirtySink<'t> {
    /// What can go wrong.
    type Error: From<GuestError> + From<KernelError>;

    /// Captures the pages of a set that was taken; what the guest had in flight then has landed. The set
    /// is the sink's from here on: dropped, its pages are dirty again.
    ///
    /// # Errors
    /// Where they go nowhere.
    fn capture(&mut self, lease: DirtyLease<'t>) -> Result<(), Self::Error>;

    /// Sets room aside for the pause: for about twice so many pages.
    fn make_room(&mut self, dirty_pages: u64);
}

/// Runs epochs: take the dirty set, drain I/O, capture; each is shorter than the
/// last, as there is less to capture. Ends when the next dirty set would fit into
/// `max_pause`, or when it does not get smaller; says which.
///
/// # Errors
/// Where the guest, its tracker or the sink fails.
pub fn converge<'t, S: DirtySink<'t>>(
    epochs: &mut Epochs,
    sink: &mut S,
    guest: &mut dyn Guest,
    tracker: &'t WriteTracker,
    max_pause: Duration,
    reached: &dyn Fn(CaptureStep),
) -> Result<Convergence, S::Error> {
    let mut last = Convergence { fits: false, pause: Duration::MAX, dirty_pages: 0 };
    let mut smallest = u64::MAX;
    let mut stubborn = 0;
    let mut flushed = false;
    for _ in 0..MOST_EPOCHS {
        let began = Instant::now();
        let lease = tracker.take(cores())?;
        let scan = began.elapsed();
        let count = lease.pages().count();
        epochs.note_hot(lease.pages());
        guest.drain()?;
        let copying = Instant::now();
        sink.capture(lease)?;
        let copy = copying.elapsed();

        let since_last = epochs.since_last(began);
        let number = epochs.note(began, count);

        // As fast as the guest wrote since the last take, it writes during
        // this epoch: that is what the pause would have to copy.
        let rate = count as f64 / since_last.as_secs_f64().max(1e-4);
        let next = (rate * began.elapsed().as_secs_f64()).min(count as f64);
        let per_page = copy.as_secs_f64() / count.max(1000) as f64;
        let pause = FIXED_PAUSE + scan + Duration::from_secs_f64(per_page * next);
        reached(CaptureStep::Epoch { number, dirty_pages: count, pause: Some(pause) });
        let fits = pause <= max_pause;
        last = Convergence { fits, pause, dirty_pages: count };
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
                sink.make_room(count);
                guest.flush()?;
                reached(CaptureStep::Flushed);
                flushed = true;
                stubborn = 0;
            }
        }
    }
    Ok(last)
}
