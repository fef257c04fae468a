//! One request at a time for each block.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard};

/// Locks on ranges of blocks: many readers of a block at a time, or one writer.
///
/// A request holds its range from before it touches the index until after it has. So between two requests that overlap,
/// of which one writes, the index is never seen half changed, and what a read saw is never remembered after a later
/// write.
#[derive(Debug, Default)]
pub struct RangeLocks {
    held: Mutex<Vec<Held>>,
    released: Condvar,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    blocks: Range<u64>,
    writes: bool,
}

impl Held {
    fn excludes(&self, other: &Self) -> bool {
        let overlap = self.blocks.start < other.blocks.end && other.blocks.start < self.blocks.end;
        overlap && (self.writes || other.writes)
    }
}

/// A range that is held until this is dropped.
#[derive(Debug)]
pub struct RangeLock<'l> {
    locks: &'l RangeLocks,
    held: Held,
}

impl RangeLocks {
    /// Waits until nobody writes any of these blocks, and keeps writers away.
    pub fn to_read(&self, blocks: Range<u64>) -> RangeLock<'_> {
        self.take(Held { blocks, writes: false })
    }

    /// Waits until nobody uses any of these blocks, and keeps all others away.
    pub fn to_write(&self, blocks: Range<u64>) -> RangeLock<'_> {
        self.take(Held { blocks, writes: true })
    }

    fn take(&self, wanted: Held) -> RangeLock<'_> {
        let mut held = self.all();
        while held.iter().any(|it| it.excludes(&wanted)) {
            held = self.released.wait(held).unwrap_or_else(|broken| broken.into_inner());
        }
        held.push(wanted.clone());
        RangeLock { locks: self, held: wanted }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Held>> {
        self.held.lock().unwrap_or_else(|broken| broken.into_inner())
    }
}

impl Drop for RangeLock<'_> {
    fn drop(&mut self) {
        let mut held = self.locks.all();
        if let Some(at) = held.iter().position(|it| *it == self.held) {
            held.swap_remove(at);
        }
        self.locks.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

    #[test]
    fn a_writer_is_alone_and_readers_are_not() {
        let locks = RangeLocks::default();
        let one = locks.to_read(0..4);
        let other = locks.to_read(2..6);
        let apart = locks.to_write(6..8);
        drop((one, other, apart));
        // Of each block: how many read it, or -1 while one writes.
        let users: Vec<AtomicI64> = (0..8).map(|_| AtomicI64::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (locks, users) = (&locks, &users);
                scope.spawn(move || {
                    for step in 0..2000u64 {
                        let from = (step * 7 + thread * 3) % 6;
                        let blocks = from..from + 1 + step % 3;
                        let all = || blocks.clone().map(|block| &users[block as usize]);
                        if step % 2 == 0 {
                            let _lock = locks.to_write(blocks.clone());
                            assert!(all().all(|it| it.fetch_sub(1, SeqCst) == 0));
                            assert!(all().all(|it| it.fetch_add(1, SeqCst) == -1));
                        } else {
                            let _lock = locks.to_read(blocks.clone());
                            assert!(all().all(|it| it.fetch_add(1, SeqCst) >= 0));
                            all().for_each(|it| assert!(it.fetch_sub(1, SeqCst) > 0));
                        }
                    }
                });
            }
        });
    }
}
