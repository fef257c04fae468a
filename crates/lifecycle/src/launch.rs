//! `run`: a guest is started, looked at, and remembered.

use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::locked_guest::{NextGuest, clear_predecessor};
use crate::ram_dir::ram_dir;
use crate::ram_files::ram_files;
use crate::served_disks::{self, ServedDisk};
use dewar_guest::GuestError;
use dewar_guest_qemu::cmdline::{PORT_FILE, Unsupported, disk_places, plan_run, with_heartbeats};
use dewar_guest_qemu::launch::{Inherited, kill, launch, make_ram_files, remove_files};
use dewar_guest_qemu::{QemuGuest, QemuUser, Qmp, RunState, discover};
use dewar_registry::{GuestFolder, GuestRecord};
use std::path::{Path, PathBuf};

/// A command line that shall become a guest.
#[derive(Debug)]
pub struct LaunchRequest {
    /// The guest's name.
    pub name: String,
    /// QEMU.
    pub program: PathBuf,
    /// The user's arguments.
    pub arguments: Vec<String>,
    /// The folder for its RAM, where it is not the usual one.
    pub ram_dir: Option<PathBuf>,
    /// Whether it is started also where its memory does not fit.
    pub overcommit: bool,
    /// Whether it gets a port for heartbeats.
    pub qos: bool,
    /// Disks that are served to it, beside those of the command line.
    pub disks: Vec<ServedDisk>,
}

/// A guest that was started.
#[derive(Debug)]
pub struct Started {
    /// Its record.
    pub record: GuestRecord,
    /// Why it does not run, if so.
    pub why_not_running: Option<&'static str>,
    /// Why no checkpoint of it can be taken, if so.
    pub no_checkpoint: Option<String>,
}

/// Starts a guest.
///
/// # Errors
/// Where it cannot be started or handled; nothing is left of it then.
pub fn start(host: &Host, request: LaunchRequest) -> Result<Started, Failure> {
    let LaunchRequest { name, program, mut arguments, ram_dir: wanted, overcommit, qos, disks } =
        request;
    let folder = host.registry.guest(&name)?;
    if qos {
        arguments = with_heartbeats(&arguments, &folder.file(PORT_FILE));
    }
    let _lock = folder.lock()?;
    let ram_dir = ram_dir(wanted);
    let socket = folder.file("qmp.sock");
    let ram_path = |id: &str| folder.ram_file(&ram_dir, id);
    let unfit = |why: Unsupported| {
        Failure::new(Code::Unsupported, format!("this command line cannot be run: {why}"))
    };
    if !disks.is_empty() {
        arguments = served_disks::on_line(&disks, &arguments, &folder)?;
    }
    let plan = plan_run(&arguments, &socket, ram_path).map_err(unfit)?;
    let here = std::env::current_dir()
        .map_err(|error| Failure::new(Code::Failed, format!("the present folder: {error}")))?;
    refuse_stale_disks(&arguments, &here)?;
    // What is made for it later, in its folder, must be open to the user that it becomes.
    if let Some(user) = QemuUser::of(&arguments).map_err(unfit)? {
        user.let_in(folder.root(), folder.root()).map_err(unfit)?;
    }
    drop(clear_predecessor(&folder, Some(&ram_dir), NextGuest::Another)?);
    let before = folder.record_if_any()?;
    let room = |folder: &Path| host.ram_room(&name, folder, overcommit);
    let owned_ram = make_ram_files(&plan.regions, 0, room)?;
    let log = folder.file("console.log");
    let memory_bytes = plan.regions.iter().map(|region| region.bytes).sum();
    served_disks::serve_line(&folder, &arguments, &disks, memory_bytes)
        .inspect_err(|_| remove_files(&owned_ram))?;
    let launched = launch(&program, &plan, &here, &log, &socket, Inherited::default())
        .inspect_err(|_| {
            remove_files(&owned_ram);
            let _ = served_disks::forget(&folder);
        })?;
    let record = GuestRecord::new(&name, launched.process, (program, arguments), here, socket);
    let mut record = GuestRecord { ram: ram_files(&plan.regions), owned_ram, ..record };
    let noted = note(&folder, &mut record, launched.qmp);
    noted.inspect_err(|_| end(&folder, &record, before))?;
    let state = Qmp::of(&record).ok().and_then(|mut qmp| RunState::of(&mut qmp).ok());
    let why_not_running = state.as_ref().and_then(RunState::why_not_running);
    let no_checkpoint = what_is_refused(&folder, &record);
    Ok(Started { record, why_not_running, no_checkpoint })
}

/// Why no checkpoint could be taken of a guest as it was started, if so: told now, and not
/// when somebody counts on one.
fn what_is_refused(folder: &GuestFolder, record: &GuestRecord) -> Option<String> {
    let mut guest = QemuGuest::attach(folder.clone(), record.clone()).ok()?;
    match guest.machine() {
        Err(GuestError::Unsupported { reasons, .. }) => Some(reasons.join("; ")),
        _ => None,
    }
}

/// Remembers a guest and sees that it can be handled.
fn note(folder: &GuestFolder, record: &mut GuestRecord, mut qmp: Qmp) -> Result<(), Failure> {
    folder.set_record(record)?;
    let found = discover(&mut qmp, record)?;
    // In the order in which its pages are counted.
    let place = |id: &str| found.ram.regions().iter().position(|region| region.name == id);
    record.ram.sort_by_key(|file| place(&file.id));
    record.ram.retain(|file| place(&file.id).is_some());
    Ok(folder.set_record(record)?)
}

/// Ends a guest that was refused, before it did anything. The one before it, whose disks may
/// be in the folder, is on record again.
fn end(folder: &GuestFolder, record: &GuestRecord, before: Option<GuestRecord>) {
    kill(&record.process);
    let _ = folder.remove_ram(record);
    let _ = served_disks::forget(folder);
    let _ = match before {
        Some(before) => folder.set_record(&before),
        None => folder.remove("guest.json"),
    };
}

/// That no disk's newest content lies in an overlay that is not written back.
fn refuse_stale_disks(arguments: &[String], here: &Path) -> Result<(), Failure> {
    let places = disk_places(arguments).unwrap_or_default();
    for place in places {
        let overlay = here.join(format!("{}.dewar-overlay", place.path));
        if overlay.exists() {
            let what = format!(
                "disk {} is not current: its newest content is in {}",
                place.path,
                overlay.display()
            );
            return Err(Failure::new(Code::Attention, what)
                .advice("'dewar ps' under the --root of the guest that used it finishes this"));
        }
    }
    Ok(())
}
