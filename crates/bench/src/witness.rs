//! When a CPU was away for all programs: a virtual machine's host may give it to
//! others, and the kernel may not let go of it.

use dewar_testkit::put_before_others;
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const BEAT: Duration = Duration::from_millis(1);
/// What a beat may be late by without being noted.
const TOLD_FROM: Duration = Duration::from_millis(3);

/// A thread on each CPU that goes before all others (`SCHED_FIFO`), sleeps a
/// millisecond at a time and notes when it was woken late.
#[derive(Debug)]
pub struct Witness {
    gaps: Arc<Mutex<Vec<(Instant, Instant)>>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Witness {
    /// Begins to watch; `None` where threads cannot be put before all others.
    pub fn watch() -> Option<Self> {
        let (gaps, stop) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let mut witness = Self { gaps, stop, threads: Vec::new() };
        let (sender, receiver) = std::sync::mpsc::channel();
        let ours = sched_getaffinity(None).ok()?;
        for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| ours.is_set(*cpu)) {
            let (gaps, stop, sender) = (witness.gaps.clone(), witness.stop.clone(), sender.clone());
            witness.threads.push(std::thread::spawn(move || {
                let first = goes_first(cpu);
                let _ = sender.send(first);
                drop(sender);
                while first && !stop.load(Ordering::Relaxed) {
                    let from = Instant::now();
                    std::thread::sleep(BEAT);
                    let to = Instant::now();
                    if to - from > BEAT + TOLD_FROM {
                        gaps.lock().expect("lock").push((from + BEAT, to));
                    }
                }
            }));
        }
        drop(sender);
        receiver.iter().all(|first| first).then_some(witness)
    }

    /// How long a CPU was away at most between two instants.
    ///
    /// # Panics
    /// Where a watching thread panicked.
    pub fn longest(&self, from: Instant, to: Instant) -> Duration {
        let gaps = self.gaps.lock().expect("lock");
        let within = |(began, ended): &(Instant, Instant)| {
            (*ended).min(to).saturating_duration_since((*began).max(from))
        };
        gaps.iter().map(within).max().unwrap_or_default()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Puts the calling thread on one CPU, before all others.
fn goes_first(cpu: usize) -> bool {
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(None, &only).is_ok() && put_before_others(gettid())
}
