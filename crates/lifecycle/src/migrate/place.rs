//! The place for a guest that is to come: everything that can be found wrong is found before the source
//! touches the guest.

use super::disks::export;
use super::moving_machine::MovingMachine;
use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::locked_guest::{NextGuest, clear_predecessor};
use crate::migration::made_disks;
use crate::ram_dir::ram_dir;
use crate::recovery::migration::refuse_earlier;
use crate::recovery::recover;
use crate::reporter::Reporter;
use dewar_guest_qemu::Incoming;
use dewar_guest_qemu::cmdline::{PORT_FILE, PlannedRegion, move_heartbeats};
use dewar_guest_qemu::freeze::start;
use dewar_guest_qemu::launch::{kill, make_ram_files, remove_files};
use dewar_memory::NewRam;
use dewar_migrate::{NewMemory, OwedMemory};
use dewar_registry::{
    Frozen, GuestFolder, GuestLock, GuestRecord, Kept, Phase, ProcessId, RamFile, RegistryError,
};
use dewar_units::{PAGE_BYTES, PageSet};
use dewar_wire::control::Offer;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// A place for a guest: a QEMU that waits for its state, on RAM files that are to be filled.
pub(super) struct Place {
    pub folder: GuestFolder,
    pub incoming: Incoming,
    pub memory: Arc<NewMemory>,
    /// How many of its disks are copied.
    pub copied: usize,
    pub lock: GuestLock,
}

impl Place {
    /// Makes one for an offered guest. Where that fails nothing is left of it.
    pub fn make(
        host: &Host,
        offer: &Offer,
        session: u64,
        reporter: &dyn Reporter,
    ) -> Result<Self, Failure> {
        let machine: MovingMachine = serde_json::from_value(offer.machine.clone())
            .map_err(|error| Failure::new(Code::Failed, format!("the offered machine: {error}")))?;
        let program = machine.program_here()?;
        machine.require_files()?;
        let folder = host.registry.guest(&offer.guest)?;
        let lock = free_name(&folder, &offer.instance)?;
        // Of a try that was killed before anything of it was on record.
        made_disks::remove(&folder);
        made_disks::keep(&folder);
        machine.require_room().inspect_err(|_| {
            let _ = folder.remove_all();
        })?;
        let ram_dir = ram_dir(None);
        drop(clear_predecessor(&folder, Some(&ram_dir), NextGuest::Another)?);
        let regions = planned_regions(offer, |id| folder.ram_file(&ram_dir, id))?;
        let ram = crate::ram_files::ram_files(&regions);
        let mut arguments = machine.arguments.clone();
        move_heartbeats(&mut arguments, &folder.file(PORT_FILE));
        let room = |place: &Path| host.ram_room(&offer.guest, place, false);
        let owned_ram = make_ram_files(&regions, 0, room)?;
        let nobody = ProcessId { pid: 0, started: 0, boot: 0 };
        let line = (program, arguments);
        let record = GuestRecord::new(
            &offer.guest,
            nobody,
            line,
            machine.folder.clone(),
            folder.file("qmp.sock"),
        );
        let record = GuestRecord {
            ram,
            owned_ram,
            phase: Phase::Arriving,
            migration: Some(session),
            frozen: Some(Frozen {
                was_running: true,
                machine: machine.machine.clone(),
                // The source has them still.
                forwards: Some(Vec::new()),
                stopped_ms: None,
                kept: Kept::AtSource,
            }),
            ..record
        };
        let files =
            machine.copied.iter().map(|it| (it.path.as_path(), it.format.as_str(), it.bytes));
        made_disks::make(&folder, files).inspect_err(|_| undo(&folder, &record))?;
        reporter.stage("starting QEMU");
        let started = start_on(&folder, &record, &machine.machine).and_then(|mut started| {
            let prepared = prepare_arrival(&folder, &mut started.0, offer, &machine);
            prepared.inspect_err(|_| {
                kill(&started.0.record().process);
            })?;
            Ok(started)
        });
        let (incoming, memory) = started.inspect_err(|_| undo(&folder, &record))?;
        Ok(Self { folder, incoming, memory, copied: machine.copied.len(), lock })
    }
}

/// Prepares what a guest needs beside its QEMU.
fn prepare_arrival(
    folder: &GuestFolder,
    incoming: &mut Incoming,
    offer: &Offer,
    machine: &MovingMachine,
) -> Result<(), Failure> {
    if offer.post_copy {
        // That its memory can be served is known before the source begins.
        try_to_serve(incoming)?;
    }
    if !machine.copied.is_empty() {
        export(folder, incoming.qmp(), &machine.copied)?;
    }
    Ok(())
}

/// That touches of a guest's memory can be answered.
fn try_to_serve(incoming: &mut Incoming) -> Result<(), Failure> {
    let (process, ram, origin) = incoming.memory()?;
    let none = PageSet::new(ram.pages());
    let served = OwedMemory::attach(none, &process, &ram, origin).and_then(|it| it.finish());
    incoming.close_uffd_device();
    Ok(served?)
}

/// Nothing is left of a place that could not be made.
fn undo(folder: &GuestFolder, record: &GuestRecord) {
    made_disks::remove(folder);
    remove_files(&record.owned_ram);
    let _ = folder.remove_all();
}

/// The lock of a name that no guest has, nor had.
pub(super) fn free_name(folder: &GuestFolder, instance: &str) -> Result<GuestLock, Failure> {
    let mut lock = folder.lock()?;
    if let Some(record) = folder.record_if_any()? {
        // What is left of an earlier try goes, and with it the lock's file.
        refuse_earlier(folder, &record, instance)?;
        if let Some(record) = folder.record_if_any()? {
            let _ = recover(folder, record);
        }
        drop(lock);
        lock = folder.lock()?;
    }
    match folder.record_if_any()? {
        None => Ok(lock),
        Some(record) if record.process.is_alive() || record.frozen.is_some() => {
            Err(RegistryError::Exists(folder.name().to_owned()).into())
        }
        Some(_) => {
            let what = format!("a guest '{}' that has ended is known there", folder.name());
            let advice = format!("'dewar rm {}' there forgets it", folder.name());
            Err(Failure::new(Code::Failed, what).advice(advice))
        }
    }
}

/// The RAM files that are to be made. What the source says of them is checked.
fn planned_regions(
    offer: &Offer,
    path: impl Fn(&str) -> std::path::PathBuf,
) -> Result<Vec<PlannedRegion>, Failure> {
    let is_name = |name: &str| {
        let fits = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        !name.is_empty() && name.len() < 100 && name.chars().all(fits)
    };
    let region = |region: &dewar_wire::control::Region| {
        let is_whole = region.bytes > 0 && region.bytes % PAGE_BYTES as u64 == 0;
        if !is_name(&region.name) || !is_whole {
            let what = format!("RAM '{}' of {} bytes cannot be made", region.name, region.bytes);
            return Err(Failure::new(Code::Unsupported, what));
        }
        let (id, bytes) = (region.name.clone(), region.bytes);
        Ok(PlannedRegion { path: path(&id), id, bytes, owned: true })
    };
    offer.regions.iter().map(region).collect()
}

/// Starts QEMU and puts it on record.
fn start_on(
    folder: &GuestFolder,
    record: &GuestRecord,
    machine: &str,
) -> Result<(Incoming, Arc<NewMemory>), Failure> {
    let mut memory = NewMemory::default();
    for RamFile { path, bytes, .. } in &record.ram {
        let failed = |error: &dyn std::fmt::Display| {
            Failure::new(Code::Failed, format!("{}: {error}", path.display()))
        };
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(|error| failed(&error))?;
        let new = NewRam::new(file, *bytes).map_err(|error| failed(&error))?;
        memory.add(new, bytes / PAGE_BYTES as u64);
    }
    let launched = start(folder, record, machine)?;
    let record = GuestRecord { process: launched.process, ..record.clone() };
    let incoming = Incoming::new(folder.clone(), record, launched.qmp);
    let noted = || -> Result<(), Failure> {
        // One that is not on record would be known to no command.
        incoming.save()?;
        Ok(incoming.require_ram()?)
    };
    noted().inspect_err(|_| {
        kill(&incoming.record().process);
    })?;
    Ok((incoming, Arc::new(memory)))
}
