//! Writes entries down, so that the loop that gives CPU time never waits for a disk:
//! while a thread is let run on, only that loop ends it.
//!
//! The writer is an ordinary thread ([`dewar_kernel::Scheduling::ahead`] is not
//! inherited), and a thread that is let run on goes before it. So the loop takes the
//! desk only where it is free; what it cannot put there now it puts there a second
//! later.

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
    desk: Arc<Queue>,
    asked: u64,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Queue {
    sheet: Mutex<Slot>,
    something: Condvar,
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
        let desk = Arc::new(Queue::default());
        let its = Arc::clone(&desk);
        let thread = std::thread::spawn(move || its.write_all(&ledger));
        Self { desk, asked: 0, thread: Some(thread) }
    }

    /// Has an entry written, in place of one that waits still; `None` where that
    /// cannot be asked for now.
    pub(crate) fn post(&mut self, entry: &Entry) -> Option<Ticket> {
        let mut sheet = self.desk.sheet.try_lock().ok()?;
        self.asked += 1;
        sheet.next = Some((self.asked, entry.clone()));
        self.desk.something.notify_one();
        Some(Ticket(self.asked))
    }

    /// Whether that entry, or a later one, is on the disk.
    pub(crate) fn has_written(&self, ticket: Ticket) -> bool {
        self.desk.written.load(Ordering::Acquire) >= ticket.0
    }
}

impl Drop for LedgerWriter {
    /// Waits for what is being written: it must not appear after the entry was removed.
    fn drop(&mut self) {
        let mut sheet = self.desk.sheet();
        *sheet = Slot { next: None, is_last: true };
        drop(sheet);
        self.desk.something.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Queue {
    fn sheet(&self) -> MutexGuard<'_, Slot> {
        self.sheet.lock().unwrap_or_else(|locked| locked.into_inner())
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
        let idle = |sheet: &mut Slot| sheet.next.is_none() && !sheet.is_last;
        let waited = self.something.wait_while(self.sheet(), idle);
        waited.unwrap_or_else(|locked| locked.into_inner()).next.take()
    }
}
