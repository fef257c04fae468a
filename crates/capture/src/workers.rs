//! Idle-priority threads: they run only on CPU time that no other thread wants.

use crate::session_nice::{Presence, STARVED, Weight};
use dewar_kernel::{OwnSession, ThreadActivity, ThreadId};
use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// How often it is looked whether idle threads starve.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How many threads the host runs at once.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
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
    fn make_idle_again(&self) {
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
pub fn urgently<T>(work: impl FnOnce() -> T) -> T {
    let worker = WORKER.with_borrow(Clone::clone);
    if let Some(worker) = &worker {
        let _ = worker.thread.make_ordinary();
    }
    let result = work();
    if let Some(worker) = worker {
        worker.make_idle_again();
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
pub struct Workers {
    weight: Weight,
}

impl Workers {
    /// Those of a process that has this session of its own.
    pub fn new(session: Option<OwnSession>) -> Self {
        Self { weight: Weight::of(session) }
    }

    /// While it lives others wait for this process, which is as heavy as they are.
    pub fn awaited(&self) -> Presence<'_> {
        self.weight.awaited()
    }

    /// Runs `work` on a thread for each CPU.
    ///
    /// # Errors
    /// The first error of `work`.
    pub fn run_idle<E: Send>(&self, work: impl Fn() -> Result<(), E> + Sync) -> Result<(), E> {
        let (begun, begins) = mpsc::channel();
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..cores())
                .map(|_| {
                    let begun = begun.clone();
                    let work = &work;
                    scope.spawn(move || {
                        let own = Worker::own();
                        own.make_idle_again();
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
        worker.make_idle_again();
        assert!(is_idle() && worker.feed() && !is_idle());
        worker.make_idle_again();
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
