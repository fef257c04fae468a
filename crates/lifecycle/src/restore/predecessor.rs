//! The guest whose name a restored one is to have.

use super::options::RestoreOptions;
use crate::failure::{Code, Failure};
use crate::held_ram::is_link;
use crate::host::Host;
use crate::locked_guest::LockedGuest;
use crate::ram_dir::ram_dir;
use dewar_checkpoint::restore::hot_pages;
use dewar_image::{ImageError, ImageReader, Record, RegionRecord, Store};
use dewar_registry::{GuestLock, GuestRecord, Phase};
use dewar_units::{ByteSize, PAGE_BYTES};
use std::fs::File;

/// Ends the guest whose name the restored one is to have, when the image was found whole but for
/// the pages themselves, and there is room for it.
pub fn end_predecessor(
    host: &Host,
    options: &RestoreOptions,
    store: &Store,
    image: &ImageReader,
    mut before: LockedGuest,
) -> Result<GuestLock, Failure> {
    let stays = |failure: Failure| failure.state("the guest that has its name was left as it is");
    let whole = || -> Result<(), ImageError> {
        image.blob("device state", &image.record().device_state)?;
        image.require_segments()?;
        image.read_table_ahead()?;
        store.check_disks(image.record())
    };
    whole().map_err(|error| stays(error.into()))?;
    hot_pages(image).map_err(|error| stays(error.into()))?;
    let ram_dir = ram_dir(options.ram_dir.clone());
    let room = host.ram_room(&before.record.name, &ram_dir, options.overcommit);
    let own: u64 =
        before.record.owned_ram.iter().filter_map(|it| it.metadata().ok()).map(|it| it.len()).sum();
    let needed = image.record().memory.pages * PAGE_BYTES as u64;
    if room.is_ok_and(|room| room.left().saturating_add(own) < needed) {
        let what = format!("there is no room for {} of RAM in its place", ByteSize(needed));
        return Err(stays(Failure::new(Code::Unsupported, what)));
    }
    if before.record.phase == Phase::Frozen {
        before.give_up_frozen()?;
    } else {
        before.end()?;
    }
    Ok(before.lock)
}

/// The RAM files of a dead guest in the order of the image's regions; none where
/// they are not the same regions.
pub fn dead_ram(dead: &GuestRecord, record: &Record) -> Vec<File> {
    let file = |region: &RegionRecord| {
        let bytes = region.pages * PAGE_BYTES as u64;
        let ram = dead.ram.iter().find(|ram| ram.id == region.name && ram.bytes == bytes)?;
        // A link leads to a process that has ended: what is there now is another's.
        File::open(&ram.path).ok().filter(|_| !is_link(&ram.path))
    };
    record.memory.regions.iter().map(file).collect::<Option<_>>().unwrap_or_default()
}
