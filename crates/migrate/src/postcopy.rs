//! The source's part of a post-copy: the pages that it still has, those that are asked for first.
//!
//! The guest stands still here, so each page has one version and is sent once; a page that is asked for
//! while it is on its way in the background is not sent again. It refers to no other page: the guest runs
//! there, and may have written that one. The background goes on behind the page that was asked for last: what
//! lies there is likely to be touched next.

use crate::MigrateError;
use crate::send::PageSender;
use dewar_codec::{Codec, FrameEncoder, PageCodec};
use dewar_memory::Ram;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use dewar_wire::pages::{Form, put_pages};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Pages that each thread of the background sends at a time: what is asked for comes behind them.
const AT_A_TIME: usize = 16;

/// Memory that the other host still lacks.
pub struct Postcopy<'p> {
    ram: &'p Ram,
    sender: &'p PageSender,
    left: Mutex<Left>,
    of: u64,
    sent: AtomicU64,
    stopped: AtomicBool,
}

struct Left {
    pages: PageSet,
    /// Where the background goes on.
    next: u64,
}

impl Left {
    /// Takes the next pages out.
    fn take(&mut self, most: usize) -> Vec<PageNumber> {
        let bound = self.pages.bound();
        let from = |start| self.pages.ranges_in(PageRange::new(start, bound));
        let found = from(self.next).next().or_else(|| from(0).next());
        let Some(range) = found else { return Vec::new() };
        let end = range.end.0.min(range.start.0 + most as u64);
        let taken = PageRange::new(range.start.0, end);
        self.pages.remove_range(taken);
        self.next = end;
        taken.pages().collect()
    }
}

impl<'p> Postcopy<'p> {
    /// The pages that the other host lacks.
    pub fn new(ram: &'p Ram, sender: &'p PageSender, lacks: PageSet) -> Self {
        let of = lacks.count();
        let left = Mutex::new(Left { pages: lacks, next: 0 });
        Self { ram, sender, left, of, sent: AtomicU64::new(0), stopped: AtomicBool::new(false) }
    }

    /// Sends all that is left, in the background. May be called on several threads.
    ///
    /// # Errors
    /// Where a connection failed.
    pub fn send_rest(&self) -> Result<(), MigrateError> {
        let mut sink = self.sender.sink();
        let mut bytes = vec![0; PAGE_BYTES];
        while !self.stopped.load(Ordering::Relaxed) {
            let pages = self.take(|left| left.take(AT_A_TIME));
            if pages.is_empty() {
                break;
            }
            for page in &pages {
                self.ram.copy_page(*page, &mut bytes);
                sink.put(*page, &bytes)?;
            }
            // Little is on its way at a time: what is asked for comes behind it.
            sink.flush()?;
            self.sent.fetch_add(pages.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The payload for pages that were asked for: those of them that were not sent.
    ///
    /// # Errors
    /// Where they cannot be compressed.
    pub fn answer(&self, wanted: &[u64]) -> Result<Vec<u8>, MigrateError> {
        let mut encoder = FrameEncoder::new(Codec::Lz4, 0);
        let (mut payload, mut bytes, mut encoded) = (Vec::new(), vec![0; PAGE_BYTES], Vec::new());
        for page in wanted.iter().map(|page| PageNumber(*page)) {
            let is_left = self.take(|left| {
                let is_left = left.pages.remove(page);
                if is_left {
                    left.next = page.0 + 1;
                }
                is_left
            });
            if !is_left {
                continue;
            }
            self.ram.copy_page(page, &mut bytes);
            let codec = encoder.encode(&bytes, &mut encoded)?;
            put_pages(&mut payload, &[page], Form::Frame(codec), &encoded);
            self.sent.fetch_add(1, Ordering::Relaxed);
        }
        Ok(payload)
    }

    /// Lets [`Postcopy::send_rest`] end before all is sent.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// How many pages the other host lacked.
    pub fn of(&self) -> u64 {
        self.of
    }

    /// How many pages were sent.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    fn take<T>(&self, from: impl FnOnce(&mut Left) -> T) -> T {
        from(&mut self.left.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
