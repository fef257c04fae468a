//! Sharing work between threads.

use crate::session_nice::{Presence, STARVED, Weight};
use dewar_kernel::{OwnSession, ThreadActivity, ThreadId};
use dewar_units::PageRange;
use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// How often it is looked whether idle threads starve.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How many threads the host runs at once.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Hands out a range in pieces, from both ends; each to one thread.
pub(crate) struct Pieces {
    left: Mutex<PageRange>,
    most: u64,
}

impl Pieces {
    /// Pieces of `most` pages, the last perhaps of fewer.
    pub(crate) fn new(all: PageRange, most: u64) -> Self {
        Self { left: Mutex::new(all), most }
    }

    /// Whether all were taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.left().is_empty()
    }

    /// The first of those left.
    pub(crate) fn take(&self) -> Option<PageRange> {
        let mut left = self.left();
        let piece = PageRange::new(left.start.0, left.start.0 + self.most).intersect(&left);
        left.start = piece.end.max(left.start);
        (!piece.is_empty()).then_some(piece)
    }

    /// A piece of at most so many pages from the end; none lies across the border of two
    /// pieces from the front where these are multiples of it.
    pub(crate) fn take_last(&self, most: u64) -> Option<PageRange> {
        let mut left = self.left();
        let odd = left.count() % most;
        let count = if odd == 0 { most } else { odd };
        let from = left.end.0.saturating_sub(count);
        let piece = PageRange::new(from, left.end.0).intersect(&left);
        left.end = piece.start.min(left.end);
        (!piece.is_empty()).then_some(piece)
    }

    /// Makes every later [`Pieces::take`] answer `None`.
    pub(crate) fn stop(&self) {
        let mut left = self.left();
        left.start = left.end;
    }

    fn left(&self) -> MutexGuard<'_, PageRange> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread of [`Workers::run_idle`].
struct Worker {
    thread: ThreadId,
    /// Whether it is one that starved, and is idle no more.
    fed: Mutex<bool>,
}

thread_local! {
    /// Set in threads of [`Workers::run_idle`].
    static WORKER: RefCell<Option<Arc<Worker>>> = const { RefCell::new(None) };
}

impl Worker {
    fn own() -> Arc<Self> {
        Arc::new(Self { thread: ThreadId::own(), fed: Mutex::new(false) })
    }

    /// Makes it idle, unless it has starved.
    fn settle(&self) {
        let fed = self.fed.lock().unwrap_or_else(PoisonError::into_inner);
        if !*fed {
            // At ordinary priority the work is as right, only less kind.
            let _ = self.thread.make_idle();
        }
    }

    /// Makes it a nice thread for good; says whether it is one now.
    fn feed(&self) -> bool {
        let mut fed = self.fed.lock().unwrap_or_else(PoisonError::into_inner);
        *fed = self.thread.make_nice(STARVED).is_ok();
        *fed
    }
}

/// Does something for which others may wait, so that an idle thread does not keep
/// them waiting until nobody wants its CPU. To be short.
pub(crate) fn urgently<T>(work: impl FnOnce() -> T) -> T {
    let worker = WORKER.with_borrow(Clone::clone);
    if let Some(worker) = &worker {
        let _ = worker.thread.make_ordinary();
    }
    let result = work();
    if let Some(worker) = worker {
        worker.settle();
    }
    result
}

/// Runs what may take no CPU time that others want: on idle threads, and in a
/// session of little weight where the process has one of its own.
///
/// Where others want every CPU all the time such a thread would hardly ever
/// run, and a checkpoint never end: one that starves is made an ordinary but
/// nice thread, and the session weighs more.
#[derive(Debug, Default)]
pub(crate) struct Workers {
    weight: Weight,
}

impl Workers {
    /// Those of a process that has this session of its own.
    pub(crate) fn new(session: Option<OwnSession>) -> Self {
        Self { weight: Weight::of(session) }
    }

    /// While it lives others wait for this process, which is as heavy as they are.
    pub(crate) fn awaited(&self) -> Presence<'_> {
        self.weight.awaited()
    }

    /// Runs `work` on a thread for each CPU; the first error wins.
    pub(crate) fn run_idle<E: Send>(
        &self,
        work: impl Fn() -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let (begun, begins) = mpsc::channel();
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..cores())
                .map(|_| {
                    let begun = begun.clone();
                    let work = &work;
                    scope.spawn(move || {
                        let own = Worker::own();
                        own.settle();
                        WORKER.set(Some(own.clone()));
                        let _ = begun.send(own);
                        drop(begun);
                        work()
                    })
                })
                .collect();
            drop(begun);
            let (done, is_done) = mpsc::channel::<()>();
            scope.spawn(move || {
                // Not before all have begun: that would take long.
                let begun = begins.iter().collect();
                let _working = self.weight.working();
                self.feed_starving(begun, &is_done);
            });
            let join = |worker: ScopedJoinHandle<'_, _>| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            let result = workers.into_iter().map(join).fold(Ok(()), Result::and);
            drop(done);
            result
        })
    }

    /// Looks after idle threads until `is_done` is closed.
    fn feed_starving(&self, workers: Vec<Arc<Worker>>, is_done: &mpsc::Receiver<()>) {
        let mut idle: Vec<_> =
            workers.into_iter().map(|worker| (worker, ThreadActivity::default())).collect();
        while is_done.recv_timeout(LOOK_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
            idle.retain_mut(|(worker, before)| {
                let now = worker.thread.activity();
                // Of a thread that cannot be judged it is not known that it runs.
                let starves = now.is_none_or(|now| is_starving(*before, now));
                *before = now.unwrap_or_default();
                let fed = starves && worker.feed();
                if fed {
                    self.weight.starved();
                }
                !fed
            });
        }
    }
}

/// Whether from one look to the next a thread wanted to run and hardly did.
fn is_starving(before: ThreadActivity, now: ThreadActivity) -> bool {
    before.runnable && now.runnable && now.ran - before.ran < LOOK_EVERY / 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use dewar_kernel::Scheduling;
    use std::sync::atomic::Ordering;

    #[test]
    fn pieces_are_taken_from_both_ends_until_they_meet() {
        let pieces = Pieces::new(PageRange::new(0, 1300), 512);
        assert_eq!(pieces.take_last(128), Some(PageRange::new(1280, 1300)));
        assert_eq!(pieces.take(), Some(PageRange::new(0, 512)));
        assert_eq!(pieces.take_last(128), Some(PageRange::new(1152, 1280)));
        assert_eq!(pieces.take(), Some(PageRange::new(512, 1024)));
        assert!(!pieces.is_empty());
        assert_eq!(pieces.take(), Some(PageRange::new(1024, 1152)));
        assert_eq!((pieces.take(), pieces.take_last(128), pieces.is_empty()), (None, None, true));
        let pieces = Pieces::new(PageRange::new(0, 1300), 512);
        pieces.stop();
        assert_eq!((pieces.take(), pieces.take_last(128), pieces.is_empty()), (None, None, true));
    }

    #[test]
    fn who_wants_to_run_and_hardly_does_starves() {
        let thread = |ran, runnable| ThreadActivity { ran: Duration::from_millis(ran), runnable };
        assert!(is_starving(thread(100, true), thread(101, true)));
        assert!(!is_starving(thread(100, true), thread(200, true)), "it has half a CPU");
        assert!(!is_starving(thread(100, true), thread(101, false)), "it waits for something");
    }

    #[test]
    fn what_is_urgent_is_not_idle() {
        let is_idle = || {
            let how = ThreadId::own().task().scheduling().expect("scheduling");
            how.policy != Scheduling::ordinary(0).policy
        };
        let work = || -> Result<(), ()> {
            assert!(is_idle());
            urgently(|| assert!(!is_idle()));
            assert!(is_idle());
            Ok(())
        };
        assert_eq!(Workers::default().run_idle(work), Ok(()));
        urgently(|| assert!(!is_idle(), "no worker"));
        // One that starved is idle no more.
        let worker = Worker::own();
        worker.settle();
        assert!(is_idle() && worker.feed() && !is_idle());
        worker.settle();
        assert!(!is_idle());
    }

    #[test]
    fn starving_workers_come_to_run() {
        // More spinning threads than CPUs, for as long as it takes.
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 * cores() {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let own_share = || -> Result<(), ()> {
                while ThreadId::own()
                    .activity()
                    .is_some_and(|it| it.ran < Duration::from_millis(150))
                {}
                Ok(())
            };
            assert_eq!(Workers::default().run_idle(own_share), Ok(()));
            stop.store(true, Ordering::Relaxed);
        });
    }
}
