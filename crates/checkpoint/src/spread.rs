//! Spreading: the dirty store takes a part of the pages that stand still, too, so that
//! two stores are written at once.
//!
//! The main store's threads take pieces from the fronts of stripes and the page sender takes
//! them from the end of the last, until nothing is left or as many pages were spread as were allowed. A page that is
//! written after it was sent is in a later epoch's set: whatever is spread is in the store
//! before an epoch begins, so that the newer version comes after it ([`crate::page_sender`]).
//! What waits in the buffer after the pause is spread in the same way; nothing is newer.
//! Meanwhile segments go to the main store one by one ([`dewar_image::ImageWriter::narrowly`]):
//! a thread that fills a segment must feel how slow that store is, or the main store's threads
//! would take all the pieces.

use crate::CheckpointError;
use crate::allowance::PIECE;
use crate::capture_context::CaptureContext;
use dewar_capture::Pieces;
use dewar_image::KeyedSink;
use dewar_units::PageRange;
use std::time::Instant;

/// Whether there is something to spread, and more may be.
pub(crate) fn may_spread(ctx: &CaptureContext<'_, '_>, pieces: &Pieces) -> bool {
    !ctx.allowance.is_used_up() && !pieces.is_empty()
}

/// Spreads pieces from the end, on idle threads, until then or while
/// [`may_spread`]. `start` makes what puts a piece's pages for one thread, and says how many
/// it put.
pub(crate) fn spread<'c, P>(
    ctx: &CaptureContext<'c, '_>,
    pieces: &Pieces,
    until: Option<Instant>,
    start: impl Fn() -> Result<P, CheckpointError> + Sync,
) -> Result<(), CheckpointError>
where
    P: FnMut(PageRange, &mut KeyedSink<'c, 'c>) -> Result<u64, CheckpointError>,
{
    let allowance = ctx.allowance;
    let in_time = || until.is_none_or(|until| Instant::now() < until);
    ctx.workers.run_idle(|| {
        let work = || -> Result<(), CheckpointError> {
            let Some(mut sink) = ctx.writer.keyed_sink()? else { return Ok(()) };
            let mut put = start()?;
            while in_time() && allowance.reserve() {
                let Some(piece) = pieces.take_last(PIECE) else {
                    allowance.free_rest(0);
                    break;
                };
                let count = put(piece, &mut sink)?;
                allowance.free_rest(count);
            }
            sink.flush()?;
            Ok(())
        };
        work().inspect_err(|_| pieces.stop())
    })
}
