//! `freeze`: a guest that needs no process.

use crate::attached_guest::AttachedGuest;
use crate::checkpoint::{CheckpointRequest, take};
use crate::clock::now_ms;
use crate::failure::{Code, Failure, GONE};
use crate::frozen_state::sums_of;
use crate::guardian::Guardian;
use crate::held_ram::{self, GivenNames};
use crate::reporter::Reporter;
use crate::tracking::{Tracking, written_before};
use dewar_guest::{Guest, Health};
use dewar_guest_qemu::QemuGuest;
use dewar_guest_qemu::freeze::{
    check, check_place, end_process, forwarded, state_file, stop_and_save,
};
use dewar_image::{Location, Store};
use dewar_memory::sum;
use dewar_registry::{
    Forward, Frozen, GuestFolder, GuestRecord, Kept, KeptDisk, Phase, RamFile, STATE_FILE,
    SUMS_FILE,
};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Where a frozen guest is kept.
#[derive(Debug)]
pub enum Place {
    /// Its RAM stays where it is; with checksums a `thaw` can tell whether it was changed.
    InPlace {
        /// Whether checksums are kept.
        checksums: bool,
        /// The process that has its RAM files open, which are to have no name from now on ([`held_ram`]). The state of its
        /// devices goes into its folder then, since what is beside its RAM will be lost.
        holder: Option<i32>,
    },
    /// As a checkpoint; its RAM is freed.
    InStore(Location),
}

/// Freezes a guest; returns its record. The guardian watches until its process has ended.
///
/// # Errors
/// Where it was not frozen; the failure says how the guest is.
pub fn freeze(
    root: &Path,
    attached: AttachedGuest,
    place: Place,
    reporter: &dyn Reporter,
) -> Result<GuestRecord, Failure> {
    freeze_when(root, attached, place, || Ok(()), reporter)
}

/// The same; when all is ready and the guest still runs, `ready` is asked whether to stop it.
///
/// # Errors
/// As [`freeze`], and those of `ready`.
pub fn freeze_when(
    root: &Path,
    attached: AttachedGuest,
    place: Place,
    ready: impl FnOnce() -> Result<(), Failure>,
    reporter: &dyn Reporter,
) -> Result<GuestRecord, Failure> {
    let AttachedGuest { mut guest, folder, lock } = attached;
    let untouched = |failure: Failure| failure.state("the guest was not touched");
    let checked = check(&mut guest).map_err(|error| untouched(error.into()))?;
    let store = match &place {
        Place::InStore(location) => {
            Some(Store::open_or_create(location).map_err(|error| untouched(error.into()))?)
        }
        Place::InPlace { .. } => {
            check_place(&guest).map_err(|error| untouched(error.into()))?;
            None
        }
    };
    let url = store.as_ref().map(Store::url);
    let guardian = Guardian::start(root, folder.name(), url.as_deref(), Some(guest.qmp()), &lock)?;
    let pauses = guardian.pauses()?;
    ready().map_err(untouched)?;
    // It stands still as long as this takes.
    pauses.begin(None);
    reporter.stage("stopping the guest");
    // From here on the record says where its files are, for the command that cleans up.
    let placed = GuestRecord { ram: checked.ram.clone(), ..guest.record().clone() };
    folder.set_record(&placed)?;
    let frozen = match (&store, &place) {
        (Some(store), _) => keep_in_store(&mut guest, &folder, store, reporter),
        (None, place) => keep_in_place(&mut guest, &folder, &checked, place, reporter),
    };
    let frozen = frozen.inspect(|_| reporter.reached("kept"));
    match frozen.and_then(|frozen| note(&mut guest, &folder, &checked, frozen)) {
        Ok(record) => {
            reporter.reached("on record");
            end_process(&mut guest, &record)?;
            if store.is_some() {
                folder.remove_ram(&record)?;
            }
            guardian.dismiss();
            Ok(record)
        }
        Err(failure) => {
            // Should it say so already: it must not be ended for it.
            let _ = folder.set_record(&placed);
            let _ = guest.rollback();
            pauses.end();
            folder.remove_kept(&checked.ram);
            held_ram::take_names_back(&placed);
            let health = guest.health();
            let failure = failure.state(format!("the guest was not frozen; {health}"));
            if let Health::Unknown(_) = health {
                // The guardian goes on with it when we end.
                return Err(failure.attention().advice("'dewar ps' tries to put it right"));
            }
            guardian.dismiss();
            Err(match health {
                Health::Gone => failure.attention().advice(GONE),
                _ => failure,
            })
        }
    }
}

/// Writes the record that says that the guest is frozen.
fn note(
    guest: &mut QemuGuest,
    folder: &GuestFolder,
    checked: &GuestRecord,
    frozen: Frozen,
) -> Result<GuestRecord, Failure> {
    let record = GuestRecord { phase: Phase::Frozen, frozen: Some(frozen), ..checked.clone() };
    guest.ensure_stopped()?;
    folder.set_record(&record)?;
    // A user that let it run until now is heard; from here on it ends.
    guest.ensure_stopped()?;
    Ok(record)
}

/// Writes what there is beside the RAM. The guest stands still from here on.
fn keep_in_place(
    guest: &mut QemuGuest,
    folder: &GuestFolder,
    checked: &GuestRecord,
    place: &Place,
    reporter: &dyn Reporter,
) -> Result<Frozen, Failure> {
    let checksums = matches!(place, Place::InPlace { checksums: true, .. });
    let holder = match place {
        Place::InPlace { holder, .. } => *holder,
        Place::InStore(_) => None,
    };
    let was_running = guest.health() == Health::Running;
    let tracking = Tracking::load(folder, guest.record())?;
    if let Some(tracking) = &tracking {
        tracking.invalidate(folder)?;
    }
    let mut stopped_ms = None;
    let bytes = stop_and_save(guest, checked, 0, || stopped_ms = Some(now_ms()))?;
    reporter.stage("writing its state");
    let tracking = tracking.filter(|tracking| tracking.since.is_some());
    let before = tracking.as_ref().and_then(|tracking| {
        written_before(guest.process(), &guest.ram(), tracking).ok().flatten()
    });
    let ram = &checked.ram;
    let named = match holder {
        Some(holder) => hold(ram, holder).map(|()| GivenNames::default())?,
        None => held_ram::give_names(checked)?,
    };
    let state = match holder {
        Some(_) => folder.file(STATE_FILE),
        None => state_file(folder, ram),
    };
    let written = || -> Result<(), Failure> {
        write_private(&state, &bytes).map_err(|error| {
            Failure::new(Code::Failed, format!("cannot write {}: {error}", state.display()))
        })?;
        if checksums {
            reporter.stage("summing up memory");
            folder.write(SUMS_FILE, &sums_of(ram)?)?;
        }
        Ok(())
    };
    written().inspect_err(|_| named.take_back())?;
    if let Some((tracking, before)) = tracking.zip(before) {
        let _ = tracking.continued(tracking.process, 0, &before).save(folder);
    }
    let found = guest.found();
    // QEMU has given them up with the state.
    let disks = found.disks.iter().map(|disk| checked.folder.join(&disk.file));
    let kept = Kept::InPlace {
        state,
        sum: format!("{:032x}", sum(&bytes)),
        sums: checksums,
        disks: disks.filter_map(|path| KeptDisk::of(&path)).collect(),
    };
    let machine = found.machine.clone();
    Ok(Frozen { was_running, machine, forwards: ports(guest), stopped_ms, kept })
}

/// Has the process that holds RAM files be the one that their paths lead to.
fn hold(ram: &[RamFile], holder: i32) -> Result<(), Failure> {
    let link = |file: &RamFile| {
        held_ram::link_to(&file.path, holder).map_err(|error| {
            Failure::new(Code::Failed, format!("cannot link {}: {error}", file.path.display()))
        })
    };
    ram.iter().try_for_each(link)
}

/// Takes a checkpoint after which the guest does not go on.
fn keep_in_store(
    guest: &mut QemuGuest,
    folder: &GuestFolder,
    store: &Store,
    reporter: &dyn Reporter,
) -> Result<Frozen, Failure> {
    let was_running = guest.health() == Health::Running;
    let stopped_ms = Some(now_ms());
    guest.hold_still()?;
    reporter.stage("saving memory");
    let request = CheckpointRequest::default();
    let taken = take(guest, folder, store, request, reporter, |_| Ok(None))?;
    let machine = guest.found().machine.clone();
    let kept = Kept::InStore { store: store.url(), image: taken.record.id.0 };
    Ok(Frozen { was_running, machine, forwards: ports(guest), stopped_ms, kept })
}

/// The ports that it forwards, last of all: its user may add some meanwhile. Of a QEMU that
/// has ended those of its command line are taken.
fn ports(guest: &mut QemuGuest) -> Option<Vec<Forward>> {
    forwarded(guest).ok()
}

fn write_private(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
