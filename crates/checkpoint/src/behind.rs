//! The last stage of a checkpoint: the guest runs again. What was captured of its memory is encoded while its
//! disks are copied.

use crate::CheckpointError;
use crate::buffer::CaptureBuffer;
use crate::bulk::write_behind;
use crate::capture_context::CaptureContext;
use crate::observe::Step;
use dewar_guest::{DiskCopy, DiskInfo, DiskPlace, Guest, GuestError};
use dewar_image::{Blob, DiskLayer, DiskRecord, Entry, ImageWriter, PageCounts};
use dewar_units::PageNumber;
use std::path::Path;

/// What a guest was at the stop, beside its memory.
pub(crate) struct GuestState<'c> {
    /// As the hypervisor saved it.
    pub device_state: &'c [u8],
    /// The pages that it wrote most often, hottest first.
    pub hottest: &'c [PageNumber],
}

/// What of an image is in the store, for its record.
pub(crate) struct Written {
    /// The page table's root.
    pub root: Entry,
    /// How many pages of which kind.
    pub counts: PageCounts,
    /// The device state.
    pub device_state: Blob,
    /// The list of the hottest pages.
    pub hot_pages: Blob,
    /// The disks.
    pub disks: Vec<DiskRecord>,
}

/// Stores all that was captured, and copies the disks as they were at the stop; `scratch` is for copies on their
/// way to a store that is no folder. `holes` of the pages were never touched.
pub(crate) fn behind(
    guest: &mut dyn Guest,
    ctx: &CaptureContext<'_, '_>,
    buffer: &CaptureBuffer,
    holes: u64,
    state: GuestState<'_>,
    scratch: &Path,
) -> Result<Written, CheckpointError> {
    let writer = ctx.writer;
    let (memory, copies) = std::thread::scope(|scope| {
        let memory = scope.spawn(|| -> Result<_, CheckpointError> {
            write_behind(buffer, ctx)?;
            let (root, counts) = writer.finish_memory(holes)?;
            let device_state = writer.put_blob(state.device_state)?;
            let hot_pages = writer.put_blob(&hot_list(state.hottest))?;
            writer.sync()?;
            Ok((root, counts, device_state, hot_pages))
        });
        let copies = copy_disks(guest, ctx, scratch);
        if copies.is_err() {
            // At once: what follows may wait for a slow store, and the disks' writes may be what
            // filled up where the copies go.
            let _ = guest.rollback();
        }
        let memory = memory.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        memory.and_then(|memory| Ok((memory, copies?)))
    })?;
    let (root, counts, device_state, hot_pages) = memory;
    ctx.observer.step(Step::WrittenBehind);
    let disks = copies
        .into_iter()
        .map(|(copy, below)| disk_record(writer, copy, below))
        .collect::<Result<Vec<_>, _>>()?;
    ctx.observer.step(Step::Synced);
    Ok(Written { root, counts, device_state, hot_pages, disks })
}

fn copy_disks(
    guest: &mut dyn Guest,
    ctx: &CaptureContext<'_, '_>,
    scratch: &Path,
) -> Result<Vec<(DiskCopy, Vec<DiskLayer>)>, CheckpointError> {
    let name = guest.name().to_owned();
    let mut below = Vec::new();
    let mut place = |number: usize, disk: &DiskInfo, tracked: bool| {
        let layers = match tracked {
            true => ctx.writer.disk_below(&disk.name, disk.virtual_bytes),
            false => Vec::new(),
        };
        let path = ctx
            .writer
            .reserve_disk(number, "qcow2", scratch)
            .map_err(|error| GuestError::failed("copying a disk", &name, error))?;
        let nearest = layers.first().map(|layer| layer.file.clone());
        below.push(layers);
        Ok(DiskPlace { path, below: nearest })
    };
    let copies = guest.copy_disks(&mut place)?;
    ctx.observer.step(Step::DisksCopied);
    // The guest may wait for its disks meanwhile.
    let _awaited = ctx.workers.awaited();
    guest.finish()?;
    ctx.observer.step(Step::DisksCurrent);
    Ok(copies.into_iter().zip(below).collect())
}

fn disk_record(
    writer: &ImageWriter<'_>,
    copy: DiskCopy,
    below: Vec<DiskLayer>,
) -> Result<DiskRecord, CheckpointError> {
    let digest = writer.put_disk(&copy.path)?;
    let file = copy.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(DiskRecord {
        name: copy.disk.name,
        file,
        format: copy.format,
        virtual_bytes: copy.disk.virtual_bytes,
        digest,
        below,
    })
}

/// Page numbers as little-endian 64-bit words.
fn hot_list(pages: &[PageNumber]) -> Vec<u8> {
    pages.iter().flat_map(|page| page.0.to_le_bytes()).collect()
}
