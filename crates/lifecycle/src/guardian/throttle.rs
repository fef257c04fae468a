//! Slows a guest down: its vCPUs' threads stand still for a share of each period.
//!
//! The guardian does it and not the command: a command that is stopped by a signal would leave the guest where
//! it stands. A guardian that is stopped is let go on each second, and if it ends, the kernel lets the threads go.

use dewar_kernel::{HeldThread, Pid};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// So short that the pause at the end is not made longer by one in which the vCPUs stand still.
const PERIOD: Duration = Duration::from_millis(10);

/// Dropped, it lets them run.
#[derive(Default)]
pub(super) struct Throttle {
    /// In hundredths of the time; 0 ends it.
    share: Arc<AtomicU8>,
    worker: Option<JoinHandle<()>>,
}

impl Throttle {
    /// Lets these threads stand still for so many hundredths of the time; once it began, they are the same ones.
    pub fn set(&mut self, percent: u8, threads: Vec<i32>) {
        self.share.store(percent.min(99), Ordering::Relaxed);
        if percent == 0 || self.worker.as_ref().is_some_and(|worker| !worker.is_finished()) {
            return;
        }
        let share = Arc::clone(&self.share);
        self.worker = std::thread::Builder::new().spawn(move || slow_down(&threads, &share)).ok();
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.share.store(0, Ordering::Relaxed);
    }
}

fn slow_down(threads: &[i32], share: &AtomicU8) {
    loop {
        let percent = u32::from(share.load(Ordering::Relaxed));
        if percent == 0 {
            return;
        }
        let hold = |thread: &i32| HeldThread::hold(Pid(*thread)).ok();
        let held: Vec<_> = threads.iter().filter_map(hold).collect();
        if held.is_empty() {
            return;
        }
        std::thread::sleep(PERIOD * percent / 100);
        drop(held);
        std::thread::sleep(PERIOD * (100 - percent) / 100);
    }
}
