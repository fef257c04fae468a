//! `migrate --dry-run` of a container.
//!
//! All of its memory is copied once on this host, as for a checkpoint, and some of the copies are sent. What it has
//! written meanwhile is counted. It runs all the while.

use super::accepted::{Accepted, MigrateOptions};
use super::container_source::{look_over, require_possible};
use super::offered::LEVEL;
use super::serving::wait_for_epoch;
use super::trial::{Prediction, SAMPLE, Trial, send};
use crate::failure::Failure;
use crate::locked_guest::LockedGuest;
use crate::reporter::Reporter;
use dewar_migrate::PageSender;
use dewar_units::PageNumber;
use dewar_wire::control::ToDestination;
use dewar_wire::ownership::FromSource;
use std::time::Instant;

/// Tries whether a container could move, and how long that would take: without what CRIU takes at both ends.
///
/// # Errors
/// Where it could not; the failure says why.
pub fn predict_container(
    locked: LockedGuest,
    options: &MigrateOptions,
    reporter: &dyn Reporter,
) -> Result<Prediction, Failure> {
    let began = Instant::now();
    require_possible(options)?;
    locked.require_alive()?;
    let LockedGuest { folder, record, lock: _lock } = locked;
    let (mut guest, machine, copies) = look_over(&folder, &record, reporter)?;
    let accepted = Accepted::offer(record.clone(), &copies, &machine, options, true, reporter)?;
    let set_up = began.elapsed();
    reporter.stage("sending some pages");
    let sender = PageSender::start(accepted.links, options.compression, LEVEL);
    let all = guest.copy_round(copies.pages())?;
    let copied = Instant::now();
    let step = all.count().div_ceil(SAMPLE).max(1) as usize;
    let pages: Vec<PageNumber> = all.iter().step_by(step).collect();
    let sending = Instant::now();
    let sent = send(&copies, &sender, &pages);
    let arrived = sent.and_then(|sent| wait_for_epoch(&accepted.control, 1).map(|()| sent));
    let seconds = sending.elapsed().as_secs_f64();
    // The other host forgets it.
    let _ = accepted.control.send(&ToDestination::Ownership(FromSource::Abort));
    let sent = arrived?;
    let written = guest.copy_round(copies.pages())?.count();
    let trial = Trial {
        set_up,
        in_use: all.count(),
        sent,
        sent_bytes: sender.bytes(),
        seconds,
        written_pages: written as f64 / copied.elapsed().as_secs_f64(),
    };
    Ok(trial.predict())
}
