//! Sharing work between threads.

use dewar_units::PageRange;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many threads the host runs at once.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Hands out a range in pieces; each to one thread.
pub(crate) struct Pieces {
    all: PageRange,
    next: AtomicU64,
    piece: u64,
}

impl Pieces {
    pub(crate) fn new(all: PageRange, piece: u64) -> Self {
        Self { all, next: AtomicU64::new(all.start.0), piece }
    }

    pub(crate) fn take(&self) -> Option<PageRange> {
        let start = self.next.fetch_add(self.piece, Ordering::Relaxed);
        let piece = PageRange::new(start, start.saturating_add(self.piece)).intersect(&self.all);
        (!piece.is_empty()).then_some(piece)
    }

    /// Makes every later [`Pieces::take`] answer `None`.
    pub(crate) fn stop(&self) {
        self.next.store(self.all.end.0, Ordering::Relaxed);
    }
}

/// Runs `work` on `threads` threads at idle priority; the first error wins.
pub(crate) fn run_idle<E: Send>(
    threads: usize,
    work: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    // At ordinary priority the work is as right, only less kind.
                    let _ = dewar_kernel::make_thread_idle();
                    work()
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .fold(Ok(()), Result::and)
    })
}
