//! The middle of a restore: a QEMU is started, the guest loaded into it and let run.

use super::new_identity::NewIdentity;
use super::options::RestoreOptions;
use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::page_server;
use crate::ram_files::ram_files;
use crate::reporter::Reporter;
use crate::served_disks;
use dewar_checkpoint::restore::{CrashedRam, fill_files};
use dewar_guest_qemu::cmdline::{PlannedRegion, require_sockets};
use dewar_guest_qemu::launch::{Inherited, kill, launch, make_ram_files};
use dewar_guest_qemu::start_from_state::{PlannedStart, SavedDisk, StartError, plan_start};
use dewar_guest_qemu::{Committed, Incoming, QmpError, RunState};
use dewar_hostreboot::dax::is_dax;
use dewar_image::{ImageReader, Store};
use dewar_registry::{Frozen, GuestFolder, GuestRecord, Origin, Phase};
use dewar_units::PAGE_BYTES;
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};

/// What a guest is made from.
pub struct Source<'s> {
    pub store: &'s Store,
    pub image: &'s ImageReader,
    /// The image's description of its machine.
    pub machine: Value,
    pub device_state: Vec<u8>,
    pub disks: Vec<SavedDisk>,
    /// RAM files of the guest before, from which pages may be taken.
    pub dead: Vec<File>,
    /// Bytes of others that are being freed.
    pub coming: u64,
    /// What was frozen under the guest's name.
    pub frozen: Option<Frozen>,
    pub ram_dir: &'s Path,
}

/// A guest that is loaded, and runs if it is to.
pub struct Loaded {
    pub record: GuestRecord,
    /// How it stands.
    pub state: RunState,
    /// How many pages the dead guest's RAM still had, where it is known.
    pub reused: Option<u64>,
    /// What QEMU said against ports that a frozen guest forwarded.
    pub unforwarded: Vec<String>,
    pub identity: NewIdentity,
}

/// Starts a QEMU and brings the guest into it. Files that are made are added to `made`.
pub fn load(
    host: &Host,
    options: &RestoreOptions,
    folder: &GuestFolder,
    source: Source<'_>,
    mut identity: NewIdentity,
    reporter: &dyn Reporter,
    made: &mut Vec<PathBuf>,
) -> Result<Loaded, Failure> {
    let Source { store, image, machine, device_state, disks, dead, coming, frozen, ram_dir } =
        source;
    let name = folder.name();
    let ram_path = |id: &str| folder.ram_file(ram_dir, id);
    let regions = image.record().memory.regions.iter();
    let regions: Vec<(String, u64)> =
        regions.map(|it| (it.name.clone(), it.pages * PAGE_BYTES as u64)).collect();
    // Of one that was frozen it may have been changed since.
    let served = match options.is_thaw() {
        true => served_disks::said_of(folder)?,
        false => served_disks::described(&machine),
    };
    let mut revival = plan_start(machine, &disks, &regions, folder, ram_path)?;
    // Its overlays are removed with the rest where this fails.
    made.extend(revival.overlays.iter().cloned());
    if frozen.as_ref().is_some_and(|frozen| frozen.forwards.is_some()) {
        // When it is loaded, those that it had.
        revival.plan.run.forward_nothing().map_err(StartError::from)?;
    }
    // Of a frozen guest its record says whether it ran.
    let ran = options.is_thaw() || options.run || revival.machine.was_running();
    let room = |folder: &Path| host.ram_room(name, folder, options.overcommit);
    let owned_ram = make_ram_files(&revival.plan.run.regions, coming, room)?;
    made.extend(owned_ram.iter().cloned());
    require_sockets(&revival.plan.line, &revival.machine.folder).map_err(StartError::from)?;
    let image_id = &image.record().id.0;
    let (mut server, mut reused) = (None, None);
    // Where memory is the file system itself, the kernel serves no page that is missing.
    let on_dax = owned_ram.iter().any(|path| is_dax(path));
    if options.eager || on_dax {
        reporter.stage("reading memory");
        let dead = CrashedRam::new(image, dead)?;
        reused = Some(fill_files(image, open_all(&revival.regions)?, &dead, reporter.observer())?);
    } else {
        let root = host.registry.root();
        let prepared = page_server::prepare(root, folder, &store.url(), image_id, &dead)?;
        // The server opens the dead guest's RAM through our descriptors.
        server = Some((prepared, dead));
    }

    reporter.stage("starting QEMU");
    let PlannedStart { machine, plan, regions, .. } = revival;
    let socket = folder.file("qmp.sock");
    let log = folder.file("console.log");
    let none = Inherited::default();
    let memory_bytes = regions.iter().map(|region| region.bytes).sum();
    served_disks::serve_line(folder, &plan.line, &served, memory_bytes)?;
    let launched = launch(&machine.program, &plan.run, &machine.folder, &log, &socket, none)?;
    let started = (machine.program, plan.line);
    let record = GuestRecord::new(name, launched.process, started, machine.folder, socket);
    let record = GuestRecord {
        ram: ram_files(&regions),
        owned_ram,
        phase: Phase::Restoring,
        start_pending: ran && !options.paused,
        origin: Some(Origin {
            store: store.url(),
            in_store: store.folder().is_some(),
            image: image_id.clone(),
            disks: disks.iter().flat_map(SavedDisk::files).collect(),
        }),
        frozen,
        ..record
    };
    let mut guest = Incoming::new(folder.clone(), record, launched.qmp);
    // A QEMU that is not on record would be known to no command.
    guest.save().inspect_err(|_| {
        kill(&guest.record().process);
    })?;
    guest.require_ram()?;
    let cards = |error: QmpError| Failure::new(Code::Failed, format!("its network cards: {error}"));
    identity.find_cards(guest.qmp()).map_err(cards)?;
    if let Some((server, _dead)) = server {
        reporter.stage("starting the page server");
        let (_, origin) = guest.uffd_origin().map_err(|error| {
            Failure::new(Code::Failed, format!("preparing to serve its memory: {error}"))
        })?;
        let attached = server.attach(&guest.record().process, origin);
        guest.close_uffd_device();
        guest.record_mut().server = Some(attached?);
        guest.save()?;
    }
    reporter.stage("loading the devices");
    page_server::load_served(folder, &mut guest, device_state)?;
    identity.pull_cables(guest.qmp()).map_err(cards)?;
    let Committed { mut state, unforwarded } = guest.commit()?;
    reporter.stage("loaded");
    // QEMU is not asked again: it may wait for a page.
    if guest.let_run(&|step| reporter.reached(step))? {
        state = RunState::named("running");
    }
    reporter.stage("started");
    Ok(Loaded { record: guest.record().clone(), state, reused, unforwarded, identity })
}

fn open_all(regions: &[PlannedRegion]) -> Result<Vec<File>, Failure> {
    let open = |region: &PlannedRegion| {
        File::options().read(true).write(true).open(&region.path).map_err(|error| {
            Failure::new(Code::Failed, format!("{}: {error}", region.path.display()))
        })
    };
    regions.iter().map(open).collect()
}
