//! Lazy restore: the guest runs at once, its pages arrive when it touches them
//! and, in the background, hottest first.
//!
//! One thread answers touches: with the whole frame that holds the page, since
//! it was expanded anyway, or its neighbours in a dirty store. Idle workers expand
//! the rest; they are not idle while they put pages in place, for then they hold
//! what the first thread waits for. A page may be sent twice by two threads; the
//! kernel keeps the first. When every page that is not zeros has arrived the
//! registration ends, and what was never touched stays a hole.
//!
//! A page that cannot be read back is **never** replaced: the guest goes on
//! waiting for it, the server tells why and tries again.

use super::crashed_ram::{CrashedRam, Kept};
use super::hot_pages;
use super::pending_pages::Missing;
use super::unavailable_stores::Away;
use crate::CheckpointError;
use crate::frames::{Group, Together, grouped, read_with};
use dewar_capture::{Pieces, Workers, urgently};
use dewar_image::{Entry, FrameCache, ImageError, ImageReader};
use dewar_memory::{FaultServer, Faults, ProcessHandle, Ram, UffdOrigin};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// How often the server looks whether it is done.
const TICK_MS: u32 = 50;
/// How far around a touched page its frame's other pages are looked for.
const AROUND: u64 = 256;
/// Pages that a background worker takes at a time.
const PIECE: u64 = 1024;
/// Hot pages that one takes at a time: few, so that none goes on with the rest while
/// another has many of them before it.
const HOT_PIECE: u64 = 128;
/// Pause before a page that could not be read is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// How far a lazy restore is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeProgress {
    /// Pages that have arrived.
    pub arrived: u64,
    /// Pages that must arrive.
    pub of: u64,
    /// Those of them that lay in the memory of the guest before.
    pub reused: u64,
    /// Why some cannot, if so.
    pub problem: Option<String>,
    /// Whether some are damaged: waiting does not help.
    pub is_damaged: bool,
}

/// How a lazy restore ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServeEnd {
    /// Every page has arrived.
    Complete,
    /// The guest's process ended before.
    GuestEnded,
}

/// Serves an image's pages to one guest.
pub struct PageServer<'a> {
    image: &'a ImageReader,
    entries: Vec<Entry>,
    dead: CrashedRam,
    faults: FaultServer,
    missing: Mutex<Missing>,
    of: u64,
    reused: AtomicU64,
    away: Away,
    damaged: AtomicBool,
    problem: Mutex<Problem>,
    guest_ended: AtomicBool,
}

/// Why pages cannot be read.
#[derive(Default)]
struct Problem {
    /// By the present pass over all pages, or else the last whole one.
    lasting: Option<String>,
    /// By the present pass.
    of_pass: Option<String>,
}

/// An image's page table, as a server needs it.
pub struct PageTable<'a> {
    image: &'a ImageReader,
    entries: Vec<Entry>,
    missing: Missing,
}

impl<'a> PageTable<'a> {
    /// Reads it; no guest is needed for that yet.
    ///
    /// # Errors
    /// Where it is damaged.
    pub fn read(image: &'a ImageReader) -> Result<Self, CheckpointError> {
        let entries = image.entries()?;
        let mut pages = PageSet::new(entries.len() as u64);
        for (page, entry) in entries.iter().enumerate() {
            if *entry != Entry::ZERO {
                pages.insert(PageNumber(page as u64));
            }
        }
        let left = pages.count();
        Ok(Self { image, entries, missing: Missing { pages, left } })
    }
}

impl<'a> PageServer<'a> {
    /// Takes charge of a guest's missing pages. From here on they wait for
    /// [`PageServer::run`]. What lies in `dead` is not read from the image.
    ///
    /// # Errors
    /// Where the guest cannot be served.
    pub fn attach(
        table: PageTable<'a>,
        dead: CrashedRam,
        process: &ProcessHandle,
        ram: &Ram,
        origin: UffdOrigin,
    ) -> Result<Self, CheckpointError> {
        let PageTable { image, entries, missing } = table;
        Ok(Self {
            image,
            entries,
            dead,
            reused: AtomicU64::new(0),
            faults: FaultServer::attach(process, ram, origin)?,
            of: missing.left,
            missing: Mutex::new(missing),
            away: Away::default(),
            damaged: AtomicBool::new(false),
            problem: Mutex::new(Problem::default()),
            guest_ended: AtomicBool::new(false),
        })
    }

    /// Serves until all is there or the guest ends. `told` hears how far it is
    /// from time to time.
    ///
    /// # Errors
    /// Where the kernel fails us; the guest then waits for the next server.
    pub fn run(self, report: impl Fn(&ServeProgress) + Sync) -> Result<ServeEnd, CheckpointError> {
        let served = std::thread::scope(|scope| {
            let background = scope.spawn(|| self.fill_background());
            let served = self.answer_touches(&report);
            if served.is_err() {
                self.guest_ended.store(true, Ordering::Relaxed);
            }
            background.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            served
        })?;
        if served == ServeEnd::Complete {
            self.faults.finish()?;
        }
        Ok(served)
    }

    fn answer_touches(
        &self,
        report: &impl Fn(&ServeProgress),
    ) -> Result<ServeEnd, CheckpointError> {
        let mut cache = FrameCache::new()?;
        // Touches that could not be answered yet.
        let mut waiting = BTreeSet::new();
        loop {
            match self.faults.wait(TICK_MS)? {
                Faults::GuestEnded => {
                    self.guest_ended.store(true, Ordering::Relaxed);
                    return Ok(ServeEnd::GuestEnded);
                }
                Faults::Pages(pages) => {
                    let quiet = pages.is_empty();
                    waiting.extend(pages);
                    waiting.retain(|page| match self.answer(*page, &mut cache) {
                        Ok(is_answered) => !is_answered,
                        Err(error) => {
                            self.note(error);
                            true
                        }
                    });
                    if self.lock().left == 0 {
                        report(&self.progress());
                        return Ok(ServeEnd::Complete);
                    }
                    if quiet {
                        report(&self.progress());
                    }
                }
            }
        }
    }

    /// Puts a touched page in place, with its frame's pages around it; not where its store
    /// is known to be away.
    fn answer(&self, page: PageNumber, cache: &mut FrameCache) -> Result<bool, CheckpointError> {
        let together = self.faults.together(page);
        if together.count() > 1 {
            return self.answer_huge(together, cache);
        }
        let with = read_with(&self.entries, page)?;
        if with.is_none() || !self.lock().contains(page) {
            // Zeros in the image; or it arrived, and the guest has given it
            // back since (a balloon): then it is zeros too.
            self.faults.zero(page)?;
            return Ok(true);
        }
        if !self.away.may_ask(with.and_then(Together::part)) {
            return Ok(false);
        }
        let start = page.0.saturating_sub(AROUND);
        let around = PageRange::new(start, (page.0 + AROUND).min(self.entries.len() as u64));
        let is_with =
            |page: &PageNumber| read_with(&self.entries, *page).is_ok_and(|it| it == with);
        let missing = self.lock();
        let wanted = |page: &PageNumber| missing.contains(*page) && is_with(page);
        let pages: Vec<PageNumber> = around.pages().filter(wanted).collect();
        drop(missing);
        let others = self.fill_from_dead(pages.into_iter())?;
        self.fill(others.into_iter(), cache).map(|()| true)
    }

    /// Puts a touched huge page in place.
    fn answer_huge(
        &self,
        pages: PageRange,
        cache: &mut FrameCache,
    ) -> Result<bool, CheckpointError> {
        let is_missing = pages.pages().any(|page| self.lock().contains(page));
        if is_missing {
            return self.fill_huge(pages, cache);
        }
        self.faults.zero(pages.start)?;
        Ok(true)
    }

    /// Puts the pages of a huge page in place, all at once; not where a store of them is known
    /// to be away.
    fn fill_huge(&self, pages: PageRange, cache: &mut FrameCache) -> Result<bool, CheckpointError> {
        let mut bytes = vec![0; pages.count() as usize * PAGE_BYTES];
        let mut put = |first: PageNumber, content: &[u8]| {
            let start = (first.0 - pages.start.0) as usize * PAGE_BYTES;
            bytes[start..start + content.len()].copy_from_slice(content);
        };
        let (kept, others) = self.dead.part(&self.entries, pages.pages());
        kept.iter().for_each(|run| put(run.first, &run.bytes));
        for group in grouped(&self.entries, others.into_iter())? {
            if !self.away.may_ask(group.part()) {
                return Ok(false);
            }
            let frame = self.read(&group, cache)?;
            for run in group.runs() {
                put(run.first(), &run.gather(frame)?);
            }
        }
        let reused: u64 = kept.iter().map(Kept::pages).sum();
        urgently(|| self.place_huge(pages, &bytes, reused)).map(|()| true)
    }

    /// Puts a huge page in place, unless it has arrived; `reused` of its pages were
    /// taken from the guest before.
    fn place_huge(
        &self,
        pages: PageRange,
        bytes: &[u8],
        reused: u64,
    ) -> Result<(), CheckpointError> {
        let mut missing = self.lock();
        // Another thread may have been faster, and the guest have given the
        // page back since.
        if pages.pages().any(|page| missing.contains(page)) {
            self.faults.fill(pages.start, bytes)?;
            for part in missing.runs_in(pages) {
                missing.arrived(part);
            }
            self.reused.fetch_add(reused, Ordering::Relaxed);
        }
        Ok(())
    }

    fn fill_background(&self) {
        let hot = hot_pages(self.image).unwrap_or_default();
        let hottest = Pieces::new(PageRange::new(0, hot.len() as u64), HOT_PIECE);
        let rest = PageRange::new(0, self.entries.len() as u64);
        let mut first = true;
        while !self.stopped() && self.lock().left > 0 {
            if !first {
                std::thread::sleep(RETRY);
            }
            first = false;
            let pieces = Pieces::new(rest, PIECE);
            let result = Workers::default().run_idle(|| -> Result<(), CheckpointError> {
                let mut cache = FrameCache::new()?;
                while let Some(piece) = hottest.take().filter(|_| !self.stopped()) {
                    let pages = &hot[piece.start.index()..piece.end.index()];
                    self.fill_missing(pages.iter().copied(), &mut cache);
                }
                while let Some(piece) = pieces.take().filter(|_| !self.stopped()) {
                    self.fill_missing(piece.pages(), &mut cache);
                }
                Ok(())
            });
            result.unwrap_or_else(|error| self.note(error));
            // What lasts was noted again.
            let mut problem = self.problem();
            problem.lasting = problem.of_pass.take();
        }
    }

    fn fill_missing(&self, pages: impl Iterator<Item = PageNumber>, cache: &mut FrameCache) {
        let wanted: Vec<PageNumber> = {
            let missing = self.lock();
            pages.filter(|page| missing.contains(*page)).collect()
        };
        let (huge, single): (Vec<_>, Vec<_>) =
            wanted.into_iter().partition(|page| self.faults.together(*page).count() > 1);
        for page in huge {
            if self.lock().contains(page) {
                let together = self.faults.together(page);
                self.fill_huge(together, cache).map(drop).unwrap_or_else(|error| self.note(error));
            }
        }
        let rest = self.fill_from_dead(single.into_iter());
        // Frame by frame, so that a damaged one keeps no other page away.
        match rest.and_then(|rest| grouped(&self.entries, rest.into_iter())) {
            Ok(groups) => {
                for group in groups {
                    if !self.away.may_ask(group.part()) {
                        continue;
                    }
                    group.read_ahead(self.image);
                    let pages = group.pages.iter().map(|(page, _)| *page);
                    self.fill(pages, cache).unwrap_or_else(|error| self.note(error));
                }
            }
            Err(error) => self.note(error),
        }
    }

    /// Reads what holds a group's pages, and notes whether its store answered.
    fn read<'c>(&self, group: &Group, cache: &'c mut FrameCache) -> Result<&'c [u8], ImageError> {
        let read = group.read(self.image, cache);
        self.away.note(group.part(), read.as_ref().err());
        read
    }

    /// Puts pages in place; those that have arrived already stay.
    fn fill(
        &self,
        pages: impl Iterator<Item = PageNumber>,
        cache: &mut FrameCache,
    ) -> Result<(), CheckpointError> {
        for group in grouped(&self.entries, pages)? {
            let frame = match self.read(&group, cache) {
                Ok(frame) => frame,
                // Each page there is by itself: a damaged one keeps no other away.
                Err(ImageError::Damaged { .. })
                    if group.source().is_some() && group.pages.len() > 1 =>
                {
                    let alone =
                        |(page, _): &(PageNumber, usize)| self.fill(std::iter::once(*page), cache);
                    let results: Vec<_> = group.pages.iter().map(alone).collect();
                    results.into_iter().collect::<Result<(), _>>()?;
                    continue;
                }
                Err(why) => return Err(why.into()),
            };
            let runs = group.runs().map(|run| Ok((run.first(), run.gather(frame)?)));
            let runs: Vec<_> = runs.collect::<Result<_, CheckpointError>>()?;
            urgently(|| {
                runs.iter().try_for_each(|(first, bytes)| self.place(*first, bytes).map(drop))
            })?;
        }
        Ok(())
    }

    /// Puts those of `pages` in place that lie in the memory of the guest before,
    /// and returns the others.
    fn fill_from_dead(
        &self,
        pages: impl Iterator<Item = PageNumber>,
    ) -> Result<Vec<PageNumber>, CheckpointError> {
        let (kept, others) = self.dead.part(&self.entries, pages);
        for run in kept {
            let placed = urgently(|| self.place(run.first, &run.bytes))?;
            self.reused.fetch_add(placed, Ordering::Relaxed);
        }
        Ok(others)
    }

    /// Puts neighbouring pages in place, but for those that have arrived; returns
    /// how many.
    fn place(&self, first: PageNumber, bytes: &[u8]) -> Result<u64, CheckpointError> {
        let run = PageRange::new(first.0, first.0 + (bytes.len() / PAGE_BYTES) as u64);
        // Looked at, filled and noted in one step: a page that arrived and was
        // given back by the guest must not be filled again.
        let mut missing = self.lock();
        let parts = missing.runs_in(run);
        for part in &parts {
            let start = (part.start.0 - first.0) as usize * PAGE_BYTES;
            let end = start + part.count() as usize * PAGE_BYTES;
            self.faults.fill(part.start, &bytes[start..end])?;
            missing.arrived(*part);
        }
        Ok(parts.iter().map(PageRange::count).sum())
    }

    fn stopped(&self) -> bool {
        self.guest_ended.load(Ordering::Relaxed)
    }

    fn note(&self, error: CheckpointError) {
        if let CheckpointError::Image(ImageError::Damaged { .. }) = error {
            self.damaged.store(true, Ordering::Relaxed);
        }
        let why = Some(error.to_string());
        *self.problem() = Problem { lasting: why.clone(), of_pass: why };
    }

    fn problem(&self) -> MutexGuard<'_, Problem> {
        self.problem.lock().unwrap_or_else(|locked| locked.into_inner())
    }

    fn progress(&self) -> ServeProgress {
        let problem = self.problem().lasting.clone();
        let missing = self.lock().left;
        ServeProgress {
            arrived: self.of - missing,
            of: self.of,
            reused: self.reused.load(Ordering::Relaxed),
            problem: problem.filter(|_| missing > 0),
            is_damaged: missing > 0 && self.damaged.load(Ordering::Relaxed),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Missing> {
        self.missing.lock().unwrap_or_else(|locked| locked.into_inner())
    }
}
