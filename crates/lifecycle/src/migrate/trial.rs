//! `migrate --dry-run`: whether the other host takes a guest, and how long it would take there.
//!
//! Some of its pages are sent, spread over its memory, and it is looked how many of them it wrote meanwhile. They
//! are read through Dewar's own mapping: nothing in the guest's QEMU is touched or noted.

use super::accepted::{Accepted, MigrateOptions};
use super::offered::LEVEL;
use super::serving::wait_for_epoch;
use crate::attached_guest::AttachedGuest;
use crate::failure::Failure;
use crate::reporter::Reporter;
use dewar_guest::Guest;
use dewar_memory::{Ram, sum};
use dewar_migrate::{MigrateError, PageSender};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use dewar_wire::control::ToDestination;
use dewar_wire::ownership::FromSource;
use std::time::{Duration, Instant};

/// Pages that are sent, at most.
pub(super) const SAMPLE: u64 = 16 << 10;
/// For how long.
const TIME: Duration = Duration::from_secs(2);

/// What a migration would be like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Bytes of memory in use.
    pub memory_bytes: u64,
    /// Bytes that would be sent for them.
    pub sent_bytes: u64,
    /// Bytes of memory that go there in a second, compressed.
    pub bytes_per_second: f64,
    /// Bytes of memory that the guest writes in a second, at least: in whole pages, each counted once.
    pub written_per_second: f64,
    /// How long it would take, if it ends at all: without what its disks take.
    pub total: Option<Duration>,
}

/// Tries whether a guest could move, and how long that would take. It is not touched.
///
/// # Errors
/// Where it could not; the failure says why.
pub fn predict(
    attached: AttachedGuest,
    options: &MigrateOptions,
    reporter: &dyn Reporter,
) -> Result<Prediction, Failure> {
    let AttachedGuest { mut guest, folder, lock: _lock } = attached;
    let began = Instant::now();
    let accepted = Accepted::reach(&mut guest, &folder, options, true, reporter)?;
    let set_up = began.elapsed();
    reporter.stage("sending some pages");
    let sender = PageSender::start(accepted.links, options.compression, LEVEL);
    let ram = guest.ram();
    let used = ram.data_ranges(PageRange::new(0, ram.pages())).map_err(MigrateError::from)?;
    let in_use: u64 = used.iter().map(PageRange::count).sum();
    let step = in_use.div_ceil(SAMPLE).max(1) as usize;
    let pages: Vec<PageNumber> = used.iter().flat_map(PageRange::pages).step_by(step).collect();
    let before = sums(&ram, &pages);
    let began = Instant::now();
    let sent = send(&ram, &sender, &pages);
    let arrived = sent.and_then(|sent| wait_for_epoch(&accepted.control, 1).map(|()| sent));
    // The other host forgets it.
    let _ = accepted.control.send(&ToDestination::Ownership(FromSource::Abort));
    let sent = arrived?;
    let seconds = began.elapsed().as_secs_f64();
    let now = sums(&ram, &pages);
    let written = before.iter().zip(&now).filter(|(before, now)| before != now).count();
    let of_all = in_use as f64 / pages.len().max(1) as f64;
    let trial = Trial {
        set_up,
        in_use,
        sent,
        sent_bytes: sender.bytes(),
        seconds,
        written_pages: written as f64 * of_all / seconds,
    };
    Ok(trial.predict())
}

/// What was measured.
pub(super) struct Trial {
    /// How long it took until pages could be sent.
    pub set_up: Duration,
    /// Pages of memory in use.
    pub in_use: u64,
    /// Pages that were sent, as so many bytes, in so many seconds.
    pub sent: u64,
    pub sent_bytes: u64,
    pub seconds: f64,
    /// Pages that the guest writes in a second.
    pub written_pages: f64,
}

impl Trial {
    pub fn predict(&self) -> Prediction {
        let page = PAGE_BYTES as f64;
        let bytes_per_second = self.sent as f64 * page / self.seconds;
        let written_per_second = self.written_pages * page;
        let share = written_per_second / bytes_per_second;
        let first = self.in_use as f64 * page / bytes_per_second;
        let of_each = self.sent_bytes as f64 / self.sent.max(1) as f64;
        Prediction {
            memory_bytes: self.in_use * PAGE_BYTES as u64,
            sent_bytes: (of_each * self.in_use as f64) as u64,
            bytes_per_second,
            written_per_second,
            // What is written while pages are sent is sent again, and what is written meanwhile.
            total: (share < 0.9)
                .then(|| self.set_up + Duration::from_secs_f64(first / (1.0 - share))),
        }
    }
}

fn sums(ram: &Ram, pages: &[PageNumber]) -> Vec<u128> {
    let mut bytes = vec![0; PAGE_BYTES];
    let one = |page: &PageNumber| {
        ram.copy_page(*page, &mut bytes);
        sum(&bytes)
    };
    pages.iter().map(one).collect()
}

/// Sends pages for some time, as an epoch; says how many.
pub(super) fn send(
    ram: &Ram,
    sender: &PageSender,
    pages: &[PageNumber],
) -> Result<u64, MigrateError> {
    let (began, mut bytes) = (Instant::now(), vec![0; PAGE_BYTES]);
    let (mut sink, mut sent) = (sender.sink(), 0);
    for page in pages {
        if began.elapsed() > TIME {
            break;
        }
        ram.copy_page(*page, &mut bytes);
        sink.put(*page, &bytes)?;
        sent += 1;
    }
    sink.flush()?;
    sender.end_epoch(1)?;
    Ok(sent)
}
