//! A thread that writes entries of the ledger, so that the control loop never waits for a disk.
//!
//! Only the control loop ends a rescue: a rescued thread would run on while the loop waits. So the loop puts
//! an entry into a queue of one and goes on. A newer entry takes the place of one that still waits.
//!
//! The writer is an ordinary thread ([`dewar_kernel::Scheduling::ahead`] is not inherited). A rescued thread
//! runs before it, so the writer may hold the queue's lock for long. The loop only tries the lock. Where the
//! lock is taken, the loop tries again a second later.

use crate::{Entry, Ledger};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Says whether an entry is on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

/// A thread that writes.
#[derive(Debug)]
pub(crate) struct LedgerWriter {
    queue: Arc<Queue>,
    asked: u64,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Queue {
    slot: Mutex<Slot>,
    changed: Condvar,
    written: AtomicU64,
}

/// What is to be written next: the newest, or nothing; and whether that is all.
#[derive(Debug, Default)]
struct Slot {
    next: Option<(u64, Entry)>,
    is_last: bool,
}

impl LedgerWriter {
    pub(crate) fn start(ledger: Ledger) -> Self {
        let queue = Arc::new(Queue::default());
        let its = Arc::clone(&queue);
        let thread = std::thread::spawn(move || its.write_all(&ledger));
        Self { queue, asked: 0, thread: Some(thread) }
    }

    /// Has an entry written, in place of one that waits still; `None` where that
    /// cannot be asked for now.
    pub(crate) fn post(&mut self, entry: &Entry) -> Option<Ticket> {
        let mut slot = self.queue.slot.try_lock().ok()?;
        self.asked += 1;
        slot.next = Some((self.asked, entry.clone()));
        self.queue.changed.notify_one();
        Some(Ticket(self.asked))
    }

    /// Whether that entry, or a later one, is on the disk.
    pub(crate) fn has_written(&self, ticket: Ticket) -> bool {
        self.queue.written.load(Ordering::Acquire) >= ticket.0
    }
}

impl Drop for LedgerWriter {
    /// Waits for what is being written: it must not appear after the entry was removed.
    fn drop(&mut self) {
        let mut slot = self.queue.slot();
        *slot = Slot { next: None, is_last: true };
        drop(slot);
        self.queue.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Queue {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(|locked| locked.into_inner())
    }

    fn write_all(&self, ledger: &Ledger) {
        while let Some((number, entry)) = self.take() {
            // How a guest fares is for people to read: a full disk takes nothing from it.
            if ledger.write(&entry).is_ok() {
                self.written.store(number, Ordering::Release);
            }
        }
    }

    /// Waits for the next; `None` at the end.
    fn take(&self) -> Option<(u64, Entry)> {
        let idle = |slot: &mut Slot| slot.next.is_none() && !slot.is_last;
        let waited = self.changed.wait_while(self.slot(), idle);
        waited.unwrap_or_else(|locked| locked.into_inner()).next.take()
    }
}
