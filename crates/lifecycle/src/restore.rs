//! `restore`: plan, make files, start QEMU, serve or fill memory, load the
//! device state, run.
//!
//! Until the guest runs its record says `restoring`: the next command that finds it so ends
//! the QEMU, which never ran the guest, and starts over. From then on a dead page server
//! is replaced by the next `restore`.

mod deferred_free;
mod load;
mod new_identity;
mod options;
mod predecessor;
mod resume;

pub use options::{RestoreOptions, Restored};
pub use resume::resume_service;

use crate::clock::bring_forward;
use crate::failure::Failure;
use crate::host::Host;
use crate::locked_guest::{LockedGuest, clear_predecessor};
use crate::ram_dir::ram_dir;
use crate::recovery::replaced;
use crate::reporter::Reporter;
use deferred_free::DeferredFree;
use dewar_checkpoint::restore::hot_pages;
use dewar_guest_qemu::identity::renew_generation;
use dewar_guest_qemu::launch::remove_files;
use dewar_guest_qemu::start_from_state::SavedDisk;
use dewar_image::{DiskRecord, ImageId, ImageReader, Store};
use dewar_registry::GuestFolder;
use dewar_units::PAGE_BYTES;
use load::{Loaded, Source, load};
use new_identity::NewIdentity;
use predecessor::{dead_ram, end_predecessor};
use std::path::PathBuf;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Brings a guest back from a checkpoint. `report` is called when the guest runs. The memory of the guest
/// that it replaces may still be in the course of being freed then; its lock is held until that is done.
///
/// # Errors
/// Where it does not come back; the failure says what became of the guest before.
pub fn restore(
    host: &Host,
    store: &Store,
    id: &ImageId,
    options: &RestoreOptions,
    reporter: &dyn Reporter,
    report: impl FnOnce(Restored) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let image = store.open_image(id)?;
    let name = options.name.clone().unwrap_or_else(|| image.record().guest.clone());
    let mut machine = image.record().machine.clone();
    if options.new_identity || name != image.record().guest {
        renew_generation(&mut machine);
    }
    let identity = match options.new_identity {
        true => NewIdentity::choose(&mut machine, options.run)?,
        false => NewIdentity::default(),
    };
    let folder = host.registry.guest(&name)?;
    let mut lock = folder.lock()?;
    replaced::end_unfinished(&folder)?;
    let mut before = folder.record_if_any()?;
    if let Some(record) = before.clone().filter(|_| options.replace) {
        let taken = LockedGuest { folder: folder.clone(), record, lock };
        lock = end_predecessor(host, options, store, &image, taken)?;
        before = folder.record_if_any()?;
    }
    let mut dead = before.as_ref().map_or(Vec::new(), |before| dead_ram(before, image.record()));
    let ram_dir = ram_dir(options.ram_dir.clone());
    let mut old_ram = DeferredFree::new(clear_predecessor(&folder, Some(&ram_dir), options.next)?);
    let mut coming = 0;
    let needed = image.record().memory.pages * PAGE_BYTES as u64;
    let room = host.ram_room(&name, &ram_dir, options.overcommit);
    let free = room.map_or(0, |room| room.left());
    if free < needed {
        dead.clear();
        coming = old_ram.free(&ram_dir);
        if options.eager || free.saturating_add(coming) < needed {
            // All of it is written to at once, or whether it fits is still to be seen.
            old_ram.wait();
            coming = 0;
        }
    }
    let forget_new = || {
        if before.is_none() {
            let _ = folder.remove_all();
        }
    };
    let mut made = Vec::new();
    // Everything that can be found damaged is found before a QEMU starts.
    let mut read = || -> Result<_, Failure> {
        let device_state = image.blob("device state", &image.record().device_state)?;
        hot_pages(&image)?;
        let disks = saved_disks(store, &image, &folder, &mut made)?;
        before.as_ref().map_or(Ok(()), |before| replaced::keep(&folder, before))?;
        Ok((device_state, disks))
    };
    let read = read();
    let (device_state, disks) = read.inspect_err(|_| {
        remove_files(&made);
        forget_new();
    })?;
    // Of another guest that was frozen under the name nothing is left by now.
    let thawed = before.as_ref().filter(|_| options.is_thaw());
    let frozen = thawed.and_then(|before| before.frozen.clone());
    let source = Source {
        store,
        image: &image,
        machine,
        device_state,
        disks,
        dead,
        coming,
        frozen,
        ram_dir: &ram_dir,
    };
    let loaded = load(host, options, &folder, source, identity, reporter, &mut made);
    let Loaded { record, state, reused, unforwarded, identity } =
        loaded.map_err(|failure| undo_load(&folder, failure, &made, forget_new))?;
    let back_at = Instant::now();
    // If this fails, the next command that looks at the guest does it.
    let _ = replaced::forget(&folder);
    if let Some(origin) = &record.origin {
        folder.remove_other_base_disks(&origin.disks);
    }
    let identified = identity.hand_over(&record, &state);
    let saved = UNIX_EPOCH + Duration::from_millis(image.record().created_ms);
    let is_running = state.is_running();
    let set_clock = || bring_forward(options.keep_clock, saved, &record.arguments, &record.folder);
    let clock = is_running.then(set_clock);
    let end = report(Restored {
        new_addresses: identity.report(),
        checkpoint: image.record().clone(),
        record,
        state,
        reused,
        unforwarded,
        clock,
        back_at,
        identified,
    });
    // Only now: the guest need not wait until the old one's memory is free.
    drop(old_ram);
    drop(lock);
    end
}

/// Puts back what was before a guest that could not be loaded; returns the failure with how things are then.
fn undo_load(
    folder: &GuestFolder,
    failure: Failure,
    made: &[PathBuf],
    forget_new: impl FnOnce(),
) -> Failure {
    if let Err(why) = replaced::end_loading(folder) {
        return why;
    }
    let now = folder.record_if_any();
    if !now.is_ok_and(|now| !now.is_some_and(|record| record.process.is_seen())) {
        // It was loaded and may run at any moment: its files are in use.
        return failure
            .attention()
            .state("the guest is loaded but was not let run")
            .advice("the next dewar command that looks at it tries again");
    }
    remove_files(made);
    if let Err(why) = replaced::rollback(folder) {
        let state = format!("no guest was started, nor the one before put back: {why}");
        return failure.attention().state(state).advice("'dewar ps' tries again");
    }
    forget_new();
    failure.state("no guest was started")
}

/// The image's disks as files, checked: those of the store itself, where it is
/// a folder, or copies in the guest's folder.
fn saved_disks(
    store: &Store,
    image: &ImageReader,
    folder: &GuestFolder,
    made: &mut Vec<PathBuf>,
) -> Result<Vec<SavedDisk>, Failure> {
    let bases = match store.folder() {
        Some(_) => folder.base_disks(),
        None => folder.make_base_disks()?,
    };
    let mut saved = |disk: &DiskRecord| -> Result<SavedDisk, Failure> {
        let (path, below) = store.disk_file(disk, &bases, made)?;
        let (name, format) = (disk.name.clone(), disk.format.clone());
        Ok(SavedDisk { name, path, below, format, virtual_bytes: disk.virtual_bytes })
    };
    image.record().disks.iter().map(&mut saved).collect()
}
