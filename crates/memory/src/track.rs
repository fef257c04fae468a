//! Which pages a guest wrote.
//!
//! **Contract.** After [`WriteTracker::arm`] every write by the guest's
//! process to a page of its RAM is in the set that some later
//! [`WriteTracker::take`] returns. The kernel clears the protection, and so
//! records the write, before the write happens; `take` reads and protects a
//! page in one step. So a copy that is made *after* taking a set either has
//! the writes of that set, or the page is in the next set.
//!
//! The one exception is I/O that was under way: a page pinned for a read
//! before `take` may be filled after it, unseen. Drain the guest's I/O between
//! taking a set and copying its pages (scan, drain, copy).
//!
//! A page that the kernel unmapped meanwhile, to swap it out or to split a huge
//! page, counts as written unless its protection was left in its place: more is
//! told than was written, never less.
//!
//! **DAX.** On a file system whose files are memory the kernel (6.7 to 7.3 at least) cannot resolve a fault where the
//! protection alone is left in a page's place (`insert_pfn` finds an entry and gives up, mm/memory.c): the guest would
//! touch the page for ever. And of a huge page it would forget that it is protected. So before such memory is tracked
//! the guest's process maps all of it by small pages, which nothing takes away again.
//!
//! Writes through other mappings of the RAM file are not seen. Nor is that a guest gives a page back which it did
//! not write (a balloon, free page reporting): what it reads there later is left open by virtio.
//!
//! Tracking goes on when the command that began it has ended: the descriptor
//! stays open in the guest's process. [`WriteTracker::resume`] takes it up, if
//! no other command has used it since. A command that begins a count anew makes a new
//! descriptor, unless the one there is known to be its own. So a command that finds its own
//! descriptor there knows that no other took its sets.
//!
//! A set that was taken is a debt, a [`DirtyLease`]: commit it once its pages
//! are safe; dropped, it goes back and the next `take` returns it again.

use crate::ram::{AddressMap, Ram};
use dewar_kernel::{
    KernelError, Pagemap, ProcessHandle, RegisterMode, UffdOrigin, Userfaultfd,
    known_userfaultfd_of, new_userfaultfd_of, populate_small_pages_in,
};
use dewar_units::{PageNumber, PageRange, PageSet};
use std::sync::Mutex;

/// Pages looked at and protected together: the kernel's own unit (one page
/// table). Asking page by page costs a call each; asking for all of RAM makes
/// KVM drop all its mappings.
const WINDOW: u64 = 512;

/// Pages protected by one call while arming: 64 MiB.
const ARM_STEP: u64 = 16 << 10;

/// Tracks the writes of one guest.
///
/// The pages that a process writes to its RAM, which lies in a file, while `work` is done:
///
/// ```no_run
/// use dewar_kernel::{KernelError, ProcessHandle, UffdOrigin};
/// use dewar_memory::{Ram, WriteTracker};
/// use dewar_units::PageSet;
///
/// fn written_during(
///     process: &ProcessHandle,
///     ram: &Ram,
///     work: impl FnOnce(),
/// ) -> Result<PageSet, KernelError> {
///     let tracker = WriteTracker::attach(process, ram, UffdOrigin::Syscall, None)?;
///     tracker.arm()?;
///     work();
///     let lease = tracker.take(2)?;
///     let written = lease.pages().clone();
///     // Without this the next set would have them again.
///     lease.commit();
///     tracker.end()?;
///     Ok(written)
/// }
/// ```
#[derive(Debug)]
pub struct WriteTracker {
    uffd: Userfaultfd,
    pagemap: Pagemap,
    map: AddressMap,
    given_back: Mutex<PageSet>,
}

/// Has a process map its RAM as it can be tracked.
fn make_trackable(process: &ProcessHandle, ram: &Ram) -> Result<(), KernelError> {
    let mut on_dax = ram.regions().iter().filter(|region| region.is_dax);
    on_dax.try_for_each(|region| populate_small_pages_in(process.pid(), &region.addresses))
}

impl WriteTracker {
    /// Prepares tracking of `ram`, mapped by `process`; see
    /// [`dewar_kernel::userfaultfd_of`] for `origin`. Nothing is tracked yet.
    /// A descriptor whose [`WriteTracker::identity`] is `known` is used again,
    /// which costs the guest less than a new one.
    ///
    /// # Errors
    /// EPERM where the process may not make a userfaultfd, EBUSY where another
    /// program tracks it.
    pub fn attach(
        process: &ProcessHandle,
        ram: &Ram,
        origin: UffdOrigin,
        known: Option<u64>,
    ) -> Result<Self, KernelError> {
        let known = match known {
            Some(identity) => known_userfaultfd_of(process, identity)?,
            None => None,
        };
        let uffd = match known {
            Some(uffd) => uffd,
            None => {
                make_trackable(process, ram)?;
                new_userfaultfd_of(process, origin)?
            }
        };
        Self::register(process, ram, uffd)
    }

    /// Takes up the count of an earlier tracker with this
    /// [`WriteTracker::identity`]; `None` where it was lost: the process is
    /// another, or somebody ended or took over the tracking.
    ///
    /// # Errors
    /// Where the guest is gone.
    pub fn resume(
        process: &ProcessHandle,
        ram: &Ram,
        identity: u64,
    ) -> Result<Option<Self>, KernelError> {
        const EPERM: i32 = 1;
        const EBUSY: i32 = 16;
        let Some(uffd) = known_userfaultfd_of(process, identity)? else { return Ok(None) };
        let lost = |error: KernelError| match error.errno() {
            Some(EPERM | EBUSY) => Ok(None),
            _ => Err(error),
        };
        // Whether all of it is still tracked, before registering makes it so.
        let pagemap = Pagemap::open(process.pid())?;
        for range in AddressMap::of(ram).regions() {
            if let Err(error) = pagemap.written(range, |_| {}) {
                return lost(error);
            }
        }
        Self::register(process, ram, uffd).map(Some).or_else(lost)
    }

    fn register(
        process: &ProcessHandle,
        ram: &Ram,
        uffd: Userfaultfd,
    ) -> Result<Self, KernelError> {
        let pagemap = Pagemap::open(process.pid())?;
        let map = AddressMap::of(ram);
        for range in map.regions() {
            uffd.register(&range, RegisterMode::WriteProtect)?;
        }
        let given_back = Mutex::new(PageSet::new(map.pages()));
        Ok(Self { uffd, pagemap, map, given_back })
    }

    /// By which [`WriteTracker::resume`] knows it again, on this boot.
    ///
    /// # Errors
    /// Where the descriptor cannot be asked.
    pub fn identity(&self) -> Result<u64, KernelError> {
        self.uffd.identity()
    }

    /// Begins a new count: from now on every write is recorded, and what was
    /// recorded before is forgotten.
    ///
    /// # Errors
    /// Where the guest is gone.
    pub fn arm(&self) -> Result<(), KernelError> {
        // In steps, between which the process may change its mappings.
        let all = PageRange::new(0, self.map.pages());
        all.pieces(ARM_STEP)
            .flat_map(|piece| self.map.addresses(piece).collect::<Vec<_>>())
            .try_for_each(|range| self.uffd.protect(&range))
    }

    /// Ends the tracking: nothing of the guest is protected any more. Its process keeps the
    /// descriptor, which does nothing then.
    ///
    /// # Errors
    /// Where the guest is gone.
    pub fn end(self) -> Result<(), KernelError> {
        self.map.regions().try_for_each(|range| self.uffd.unregister(&range))
    }

    /// The pages of `range` written since they were last taken; they stay so. Those that a dropped lease gave
    /// back are not among them.
    ///
    /// # Errors
    /// Where the guest is gone, or somebody ended the tracking.
    pub fn peek(&self, range: PageRange) -> Result<Vec<PageRange>, KernelError> {
        let mut found = Vec::new();
        for addresses in self.map.addresses(range) {
            self.pagemap.written(addresses, |written| found.extend(self.map.pages_at(&written)))?;
        }
        Ok(found)
    }

    /// Whether a page was written since it was last taken; it stays so. What a dropped lease gave back is
    /// not looked at.
    ///
    /// # Errors
    /// As [`WriteTracker::peek`].
    pub fn is_written(&self, page: PageNumber) -> Result<bool, KernelError> {
        let mut is_written = false;
        for addresses in self.map.addresses(PageRange::new(page.0, page.0 + 1)) {
            self.pagemap.written(addresses, |_| is_written = true)?;
        }
        Ok(is_written)
    }

    /// Looks, with `threads` threads, which pages were written since the last
    /// take; they stay so. Costs less than taking them: nothing is protected.
    ///
    /// # Errors
    /// Where the guest is gone, or somebody ended the tracking.
    pub fn look(&self, threads: usize) -> Result<PageSet, KernelError> {
        let mut pages = PageSet::new(self.map.pages());
        for ranges in self.in_parts(threads, |part| self.peek(part)) {
            ranges?.into_iter().for_each(|range| pages.insert_range(range));
        }
        pages.union_with(&self.given_back.lock().unwrap_or_else(|locked| locked.into_inner()));
        // In a process that is ending nothing is written any more, and not every kernel calls
        // that an error (6.18 does); but none registers anything in it.
        self.map
            .regions()
            .try_for_each(|range| self.uffd.register(&range, RegisterMode::WriteProtect))?;
        Ok(pages)
    }

    /// Takes the set of pages written since the last take, with `threads`
    /// threads, and begins the next.
    ///
    /// # Errors
    /// Where the guest is gone, or somebody ended the tracking.
    pub fn take(&self, threads: usize) -> Result<DirtyLease<'_>, KernelError> {
        let pages = PageSet::new(self.map.pages());
        let mut lease = DirtyLease { pages, tracker: Some(self) };
        // What one thread took must not be lost because another failed: all
        // enters the lease first.
        let mut failure = None;
        for (ranges, error) in self.in_parts(threads, |part| self.take_part(part)) {
            ranges.into_iter().for_each(|range| lease.pages.insert_range(range));
            failure = failure.or(error);
        }
        let mut given_back = self.given_back.lock().unwrap_or_else(|locked| locked.into_inner());
        lease.pages.union_with(&given_back);
        given_back.clear();
        drop(given_back);
        failure.map_or(Ok(lease), Err)
    }

    /// Counts pages as written that are known to be from elsewhere, as from the
    /// tracker of a process that the guest was in before.
    pub fn count_in(&self, pages: &PageSet) {
        self.restore_dirty(pages);
    }

    /// Does `work` on all pages, shared among `threads` threads.
    fn in_parts<T: Send>(&self, threads: usize, work: impl Fn(PageRange) -> T + Sync) -> Vec<T> {
        let all = PageRange::new(0, self.map.pages());
        let share = all.count().div_ceil(threads.max(1) as u64).next_multiple_of(WINDOW);
        let mut parts = all.pieces(share);
        let Some(first) = parts.next() else { return Vec::new() };
        std::thread::scope(|scope| {
            let work = &work;
            let others: Vec<_> = parts.map(|part| scope.spawn(move || work(part))).collect();
            let mut results = vec![work(first)];
            results.extend(
                others.into_iter().map(|part| {
                    part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                }),
            );
            results
        })
    }

    /// Takes what was written in `part`: looks first, then protects only the
    /// windows that have something.
    fn take_part(&self, part: PageRange) -> (Vec<PageRange>, Option<KernelError>) {
        let mut taken = Vec::new();
        let result = self.peek(part).and_then(|dirty| {
            for window in windows(&dirty) {
                for addresses in self.map.addresses(window.intersect(&part)) {
                    self.pagemap.written_and_protect(addresses, |written| {
                        taken.extend(self.map.pages_at(&written));
                    })?;
                }
            }
            Ok(())
        });
        (taken, result.err())
    }

    fn restore_dirty(&self, pages: &PageSet) {
        let mut given_back = self.given_back.lock().unwrap_or_else(|locked| locked.into_inner());
        given_back.union_with(pages);
    }
}

/// The windows that hold the ranges, neighbours joined.
fn windows(ranges: &[PageRange]) -> Vec<PageRange> {
    let mut joined: Vec<PageRange> = Vec::new();
    for range in ranges {
        let start = range.start.0 - range.start.0 % WINDOW;
        let end = range.end.0.next_multiple_of(WINDOW);
        match joined.last_mut() {
            Some(last) if last.end.0 >= start => last.end.0 = last.end.0.max(end),
            _ => joined.push(PageRange::new(start, end)),
        }
    }
    joined
}

/// A taken dirty set: its pages are not recorded anywhere else any more.
#[derive(Debug)]
#[must_use = "a dirty set is a debt: commit it or let it go back"]
pub struct DirtyLease<'t> {
    pages: PageSet,
    tracker: Option<&'t WriteTracker>,
}

impl DirtyLease<'_> {
    /// The pages.
    pub fn pages(&self) -> &PageSet {
        &self.pages
    }

    /// Says that the pages are safe.
    pub fn commit(mut self) {
        self.tracker = None;
    }

    /// Makes one debt of two.
    pub fn absorb(&mut self, other: Self) {
        self.pages.union_with(&other.pages);
        other.commit();
    }
}

impl Drop for DirtyLease<'_> {
    fn drop(&mut self) {
        if let Some(tracker) = self.tracker {
            tracker.restore_dirty(&self.pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_join_neighbours_and_cover_all() {
        let dirty = [PageRange::new(1, 2), PageRange::new(500, 520), PageRange::new(5000, 5001)];
        assert_eq!(windows(&dirty), [PageRange::new(0, 1024), PageRange::new(4608, 5120)]);
    }
}
