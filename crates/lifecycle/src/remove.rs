//! `rm`: a guest is forgotten.

use crate::container::arriving::throw_away;
use crate::container_process::unmount_files;
use crate::failure::Failure;
use crate::host::Host;
use crate::locked_guest::LockedGuest;
use crate::migration::{is_elsewhere, made_disks, migration_of};
use crate::process::connect;
use crate::ram_dir::usual_dirs;
use crate::tracking;
use dewar_guest_qemu::launch::{end_strays, kill};
use dewar_guest_qemu::{Journal, map_backends, remove_bitmaps};
use dewar_registry::{GuestFolder, GuestRecord, RegistryError};
use dewar_wire::ownership::{DestinationRecord, SourceRecord};

/// Ends a guest whatever state it is in, and forgets it. Returns what could not be put right of its
/// disks: no later command will.
///
/// # Errors
/// Where it does not end, or what was written to its disks lies in its folder still.
pub fn remove_by_force(host: &Host, name: &str) -> Result<Option<String>, Failure> {
    let folder = host.registry.guest(name)?;
    if !folder.file("").exists() {
        return Err(RegistryError::NoSuchGuest(name.to_owned()).into());
    }
    let lock = folder.lock()?;
    let left = match folder.record() {
        Ok(record) => {
            let mut held = LockedGuest { folder: folder.clone(), record, lock };
            let left = match is_given_up(&folder, &held.record) {
                true => None,
                false => held.end().err(),
            };
            if let Some(failure) = left {
                if held.record.process.is_alive() || holds_disks(&folder) {
                    return Err(failure);
                }
                unmount_files(&folder)?;
                held.folder.remove_ram(&held.record)?;
                Some(failure.whole())
            } else {
                unmount_files(&folder)?;
                held.folder.remove_ram(&held.record)?;
                None
            }
        }
        // Its record is damaged or was never written: what there is of it goes by its name.
        Err(_) => {
            end_strays(&folder.file("qmp.sock"), None);
            // Of a guest whose coming was killed before it was on record.
            made_disks::remove(&folder);
            unmount_files(&folder)?;
            None
        }
    };
    usual_dirs().into_iter().try_for_each(|it| folder.sweep_ram(it))?;
    folder.remove_all()?;
    Ok(left)
}

/// Ends the process of a guest that moved, if it is one that can go on in no other way: one that ran on at
/// the other host, or one that was given to this host and whose memory may be there. Says whether it is.
fn is_given_up(folder: &GuestFolder, record: &GuestRecord) -> bool {
    let on_disk = migration_of(folder, record).ok().flatten().and_then(|(_, on_disk)| on_disk);
    let Some(on_disk) = on_disk.filter(|_| is_elsewhere(record)) else { return false };
    let is_old = on_disk.source() == Some(SourceRecord::Serving);
    let is_partial = on_disk.destination() == Some(DestinationRecord::Owned);
    match record.container {
        Some(_) => is_partial && throw_away(folder, record).is_ok(),
        None => (is_old || is_partial) && kill(&record.process),
    }
}

/// Whether the guest's folder holds what was written to a disk and is not in it yet.
fn holds_disks(folder: &GuestFolder) -> bool {
    let journal = Journal::load(folder).ok().flatten();
    let inside = folder.file("");
    journal.is_some_and(|it| it.disks.iter().any(|disk| disk.overlay.starts_with(&inside)))
}

/// Takes away what a checkpoint left in a QEMU for the next one: writes are not tracked any
/// more, and nothing keeps its user from going back to a snapshot of their own.
pub fn leave(guest: &LockedGuest) -> Option<()> {
    if guest.record.container.is_some() {
        return Some(());
    }
    let mut qmp = connect(&guest.record).ok()?;
    let removed = remove_bitmaps(&mut qmp).ok();
    let ram = map_backends(&mut qmp, &guest.record).ok()?;
    tracking::end(&guest.folder, &guest.record, &ram).and(removed)
}
