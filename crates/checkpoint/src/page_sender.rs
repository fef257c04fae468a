//! Epochs beside the bulk pass, into a dirty store (TLC's page sender).
//!
//! Every `--epoch` the dirty set is taken, the guest's I/O drained, and each of
//! its pages claimed and put into the dirty store, over the version of an epoch
//! before. The bulk pass skips pages that were claimed; one that it has copied
//! already gives way to the newer version, whichever of the two comes first
//! ([`ImageWriter::yielding_sink`]). After the pass what was written since is
//! captured as without a dirty store.

use crate::CheckpointError;
use crate::bulk::{Pass, Tally};
use crate::capture_context::CaptureContext;
use crate::captures::Captures;
use crate::observe::Step;
use dewar_capture::{CaptureStep, Epochs, PIECE, Pieces, cores};
use dewar_guest::Guest;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Runs the bulk pass, with epochs every so often beside it. In between pages are spread
/// ([`crate::spread`]).
pub(crate) fn bulk_with_epochs<'t>(
    (epochs, captures): (&mut Epochs, &mut Captures<'t>),
    guest: &mut dyn Guest,
    ctx: &CaptureContext<'_, 't>,
    pass: &Pass<'_>,
    every: Duration,
    tally: &Tally,
) -> Result<(), CheckpointError> {
    let (done, is_done) = mpsc::channel::<()>();
    let mut narrowly = pass.may_spread(ctx).then(|| ctx.writer.narrowly());
    std::thread::scope(|scope| {
        let bulk = scope.spawn(|| {
            let _done = done;
            pass.run(ctx, tally)
        });
        let mut beside = || -> Result<(), CheckpointError> {
            loop {
                let due = Instant::now() + every;
                if pass.may_spread(ctx) {
                    pass.spread(ctx, tally, due)?;
                }
                if !pass.may_spread(ctx) {
                    drop(narrowly.take());
                }
                let left = due.saturating_duration_since(Instant::now());
                if is_done.recv_timeout(left) != Err(RecvTimeoutError::Timeout) {
                    return Ok(());
                }
                epoch((&mut *epochs, &mut *captures), guest, ctx)?;
            }
        };
        let beside = beside();
        if beside.is_err() {
            tally.stop();
        }
        drop(narrowly);
        let bulk = bulk.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        beside.and(bulk)
    })
}

fn epoch<'t>(
    (epochs, captures): (&mut Epochs, &mut Captures<'t>),
    guest: &mut dyn Guest,
    ctx: &CaptureContext<'_, 't>,
) -> Result<(), CheckpointError> {
    let CaptureContext { ram, tracker, writer, workers, observer, .. } = *ctx;
    let began = Instant::now();
    let awaited = workers.awaited();
    let lease = tracker.take(cores())?;
    let pages: Vec<PageNumber> = lease.pages().iter().collect();
    writer.claim(lease.pages());
    // Ours from here on: whatever fails, it is given back.
    captures.owe(lease);
    guest.drain()?;
    drop(awaited);
    let sent = AtomicU64::new(0);
    let pieces = Pieces::new(PageRange::new(0, pages.len() as u64), PIECE);
    workers.run_idle(|| {
        let work = || -> Result<(), CheckpointError> {
            let Some(mut sink) = writer.keyed_sink()? else { return Ok(()) };
            let mut bytes = vec![0; PAGE_BYTES];
            while let Some(piece) = pieces.take() {
                for page in &pages[piece.start.index()..piece.end.index()] {
                    ram.copy_page(*page, &mut bytes);
                    sent.fetch_add(u64::from(sink.put(*page, &bytes)?), Ordering::Relaxed);
                }
            }
            sink.flush()?;
            Ok(())
        };
        work().inspect_err(|_| pieces.stop())
    })?;
    captures.keyed += sent.into_inner();
    let dirty_pages = pages.len() as u64;
    let number = epochs.note(began, dirty_pages);
    observer.step(Step::Capture(CaptureStep::Epoch { number, dirty_pages, pause: None }));
    Ok(())
}
