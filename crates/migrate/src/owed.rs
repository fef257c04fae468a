//! The destination's part of a post-copy: the guest runs, and pages that it touches before they have come
//! are asked for.
//!
//! **A page is put in place once.** A page that is owed is missing in the RAM file until its content is
//! there whole (userfaultfd(2)), and whatever comes for one that is not missing is left out. What is
//! missing is seen in the RAM files: so a later process can go on with the set of what was owed.

use crate::MigrateError;
use dewar_codec::FrameDecoder;
use dewar_memory::{FaultServer, Faults, ProcessHandle, Ram, UffdOrigin};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use dewar_wire::pages::{Entry, Form, entries};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What the kernel says of memory whose process has ended.
const ESRCH: i32 = 3;

/// How long a process may take to be gone whose memory is.
const ENDING: Duration = Duration::from_secs(2);

/// Memory that is in use, of which the source still has pages.
#[derive(Debug)]
pub struct OwedMemory {
    faults: FaultServer,
    process: ProcessHandle,
    missing: Mutex<Missing>,
    of: u64,
}

#[derive(Debug)]
struct Missing {
    pages: PageSet,
    left: u64,
    /// Those that the source was asked for.
    asked: PageSet,
}

impl OwedMemory {
    /// Takes charge of a guest's memory: from here on a touch of a page that is not there waits. Of the
    /// pages of `owed` those are missing that have no storage.
    ///
    /// # Errors
    /// Where the process cannot be served, or its memory comes in huge pages.
    pub fn attach(
        mut owed: PageSet,
        process: &ProcessHandle,
        ram: &Ram,
        origin: UffdOrigin,
    ) -> Result<Self, MigrateError> {
        let of = owed.count();
        if ram.regions().iter().any(|region| region.step != 1) {
            return Err(MigrateError::HugePages);
        }
        let faults = FaultServer::attach(process, ram, origin)?;
        let process = process.try_clone()?;
        for present in ram.data_ranges(PageRange::new(0, ram.pages()))? {
            owed.remove_range(present);
        }
        let (left, asked) = (owed.count(), PageSet::new(owed.bound()));
        Ok(Self { faults, process, missing: Mutex::new(Missing { pages: owed, left, asked }), of })
    }

    /// How many pages the guest has.
    pub fn pages(&self) -> u64 {
        self.lock().pages.bound()
    }

    /// How many pages were owed.
    pub fn of(&self) -> u64 {
        self.of
    }

    /// How many are missing.
    pub fn left(&self) -> u64 {
        self.lock().left
    }

    /// Those that are missing.
    pub fn missing(&self) -> PageSet {
        self.lock().pages.clone()
    }

    /// Waits up to so long for touches, and says which pages are to be asked for; `None` where the guest's
    /// process has ended.
    ///
    /// # Errors
    /// Where the kernel fails us.
    pub fn wanted(&self, timeout_ms: u32) -> Result<Option<Vec<PageNumber>>, MigrateError> {
        match self.touched(timeout_ms) {
            Err(_) if self.process.ends_within(ENDING) => Ok(None),
            result => result,
        }
    }

    fn touched(&self, timeout_ms: u32) -> Result<Option<Vec<PageNumber>>, MigrateError> {
        let Faults::Pages(mut pages) = self.faults.wait(timeout_ms)? else { return Ok(None) };
        let mut missing = self.lock();
        let mut zeros = Vec::new();
        pages.retain(|page| match missing.pages.contains(*page) {
            true => missing.asked.insert(*page),
            false => {
                zeros.push(*page);
                false
            }
        });
        // Under the lock: another may be put in place just now, and the guest have given it back.
        // The page was never written; or it has come since it was touched.
        zeros.into_iter().try_for_each(|page| self.faults.zero(page))?;
        Ok(Some(pages))
    }

    /// Puts those pages in place that are missing; `bytes` are those of all.
    pub(crate) fn place(&self, pages: &[PageNumber], bytes: &[u8]) -> Result<(), MigrateError> {
        for (page, content) in pages.iter().zip(bytes.chunks_exact(PAGE_BYTES)) {
            let mut missing = self.lock();
            if !missing.pages.contains(*page) {
                continue;
            }
            match self.faults.fill(*page, content) {
                // The guest's process has ended: who waits for touches says so.
                Err(error) if error.errno() == Some(ESRCH) => {}
                filled => {
                    filled?;
                    missing.pages.remove(*page);
                    missing.left -= 1;
                }
            }
        }
        Ok(())
    }

    /// The same for zeros.
    pub(crate) fn place_zeros(&self, range: PageRange) -> Result<(), MigrateError> {
        let missing: Vec<PageRange> = self.lock().pages.ranges_in(range).collect();
        let mut pages = missing.iter().flat_map(PageRange::pages);
        pages.try_for_each(|page| self.place(&[page], &[0; PAGE_BYTES]))
    }

    /// Puts the pages of a payload in place.
    ///
    /// # Errors
    /// Where it is damaged.
    pub fn take(&self, payload: &[u8]) -> Result<(), MigrateError> {
        let (mut decoder, mut expanded) = (FrameDecoder::new()?, Vec::new());
        for entry in entries(payload, self.pages()) {
            match entry? {
                Entry::Zeros(range) => self.place_zeros(range)?,
                Entry::Encoded { pages, form: Form::Frame(codec), bytes } => {
                    decoder.decode(codec, bytes, pages.len() * PAGE_BYTES, &mut expanded)?;
                    self.place(&pages, &expanded)?;
                }
                // What it was compared with the guest may have written since.
                Entry::Encoded { pages, form: Form::Words(_), .. } => {
                    return Err(MigrateError::Refers(pages[0]));
                }
                Entry::Same(pairs) => return Err(MigrateError::Refers(pairs[0].1)),
            }
        }
        Ok(())
    }

    /// Ends the service when nothing is missing: touches wait no more.
    ///
    /// # Errors
    /// Where the kernel fails us.
    pub fn finish(&self) -> Result<(), MigrateError> {
        match self.faults.finish() {
            Err(_) if self.process.ends_within(ENDING) => Ok(()),
            result => Ok(result?),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Missing> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
