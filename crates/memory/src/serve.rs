//! Supplying pages that a guest has not got yet.
//!
//! **Contract.** From [`FaultServer::attach`] to [`FaultServer::finish`] a
//! touch of a page that is not there waits for [`FaultServer::fill`] or
//! [`FaultServer::zero`]. A copy of the descriptor stays open in the guest's
//! process: if the server dies the touches go on waiting, and the next server
//! takes them over. Pages enter the guest only whole (`UFFDIO_COPY`); never
//! write them through another mapping, where half a page could be seen.

use crate::ram::{AddressMap, Ram};
use dewar_kernel::{
    KernelError, ProcessHandle, RegisterMode, UffdOrigin, Userfaultfd, userfaultfd_of,
};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::os::fd::AsFd;

/// What [`FaultServer::wait`] saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Faults {
    /// Pages that the guest waits for; none where the time ran out.
    Pages(Vec<PageNumber>),
    /// The guest's process has ended.
    GuestEnded,
}

/// Serves one guest's missing pages.
#[derive(Debug)]
pub struct FaultServer {
    uffd: Userfaultfd,
    map: AddressMap,
    process: ProcessHandle,
}

impl FaultServer {
    /// Takes charge of all RAM of `process`; a server that died before is
    /// taken over from.
    ///
    /// # Errors
    /// EPERM where the process may not make a userfaultfd, EBUSY where another
    /// program serves it.
    pub fn attach(
        process: &ProcessHandle,
        ram: &Ram,
        origin: UffdOrigin,
    ) -> Result<Self, KernelError> {
        let uffd = userfaultfd_of(process, origin)?;
        let process = process.try_clone()?;
        let map = AddressMap::of(ram);
        for range in map.regions() {
            uffd.register(&range, RegisterMode::Missing)?;
            // Who waits for a predecessor that read its message and died must
            // ask again.
            uffd.wake(&range)?;
        }
        Ok(Self { uffd, map, process })
    }

    /// Waits up to `timeout_ms` for touches.
    ///
    /// # Errors
    /// Where the descriptor cannot be read.
    pub fn wait(&self, timeout_ms: u32) -> Result<Faults, KernelError> {
        let faults = self.uffd.wait_faults(self.process.as_fd(), timeout_ms)?;
        Ok(faults.map_or(Faults::GuestEnded, |faults| {
            let pages = faults.iter().filter_map(|fault| self.map.page_at(fault.address));
            Faults::Pages(pages.collect())
        }))
    }

    /// The pages that can only be put in place together with `page`, itself
    /// among them: one, or those of a huge page.
    pub fn together(&self, page: PageNumber) -> PageRange {
        self.map.together(page)
    }

    /// Puts pages in place from `first` on, whole huge pages where they are
    /// huge; those that are there already stay.
    ///
    /// # Errors
    /// ESRCH where the guest ended, ENOMEM where there is no room.
    pub fn fill(&self, first: PageNumber, pages: &[u8]) -> Result<(), KernelError> {
        let count = (pages.len() / PAGE_BYTES) as u64;
        let step = self.together(first).count() as usize * PAGE_BYTES;
        let mut left = pages;
        for addresses in self.map.addresses(PageRange::new(first.0, first.0 + count)) {
            let (part, rest) = left.split_at((addresses.end - addresses.start) as usize);
            self.uffd.fill(addresses.start, part, step)?;
            left = rest;
        }
        Ok(())
    }

    /// Puts a page of zeros in place, with those that come together with it.
    ///
    /// # Errors
    /// As [`FaultServer::fill`].
    pub fn zero(&self, page: PageNumber) -> Result<(), KernelError> {
        const EEXIST: i32 = 17;
        let together = self.together(page);
        if together.count() > 1 {
            // There is no UFFDIO_ZEROPAGE for huge pages.
            return self.fill(together.start, &vec![0; together.count() as usize * PAGE_BYTES]);
        }
        for addresses in self.map.addresses(PageRange::new(page.0, page.0 + 1)) {
            match self.uffd.zero(&addresses) {
                Err(error) if error.errno() == Some(EEXIST) => self.uffd.wake(&addresses)?,
                other => drop(other?),
            }
        }
        Ok(())
    }

    /// Ends the service: every page that is still missing is a zero page.
    ///
    /// # Errors
    /// Where the guest is gone.
    pub fn finish(&self) -> Result<(), KernelError> {
        self.map.regions().try_for_each(|range| self.uffd.unregister(&range))
    }
}
