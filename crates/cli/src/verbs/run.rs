use crate::args::RunArgs;
use crate::context::{Context, clear_predecessor};
use crate::failure::{Code, Failure};
use crate::output::printable;
use crate::ram_dir::ram_dir;
use crate::verbs::doctor::require_tracking;
use dewar_guest::GuestError;
use dewar_guest_qemu::cmdline::{
    PORT_FILE, PlannedRegion, Unsupported, disk_places, plan_run, with_heartbeats,
};
use dewar_guest_qemu::launch::{Inherited, kill, launch, make_ram_files, remove_files};
use dewar_guest_qemu::{QemuGuest, QemuUser, Qmp, RunState, discover};
use dewar_registry::{GuestFolder, GuestRecord, RamFile};
use dewar_units::ByteSize;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

pub fn run(context: &Context, args: RunArgs) -> Result<(), Failure> {
    require_tracking()?;
    let (program, mut arguments) = split_command(args.command)?;
    let folder = context.registry.guest(&args.name)?;
    if args.qos {
        arguments = with_heartbeats(&arguments, &folder.file(PORT_FILE));
    }
    // Disks that this one needs may be another's that a dead command left; what cannot be
    // finished with that is told, and in nobody's way.
    for failure in context.settle_all()?.failures {
        failure.note();
    }
    let _lock = folder.lock()?;
    let ram_dir = ram_dir(args.ram_dir);
    let qmp_path = folder.file("qmp.sock");
    let ram_path = |id: &str| folder.ram_file(&ram_dir, id);
    let unfit = |why: Unsupported| {
        Failure::new(Code::Unsupported, format!("this command line cannot be run: {why}"))
    };
    let plan = plan_run(&arguments, &qmp_path, ram_path).map_err(unfit)?;
    let here = std::env::current_dir()
        .map_err(|error| Failure::new(Code::Failed, format!("the present folder: {error}")))?;
    refuse_stale_disks(&arguments, &here)?;
    // What is made for it later, in its folder, must be open to the user that it becomes.
    if let Some(user) = QemuUser::of(&arguments).map_err(unfit)? {
        user.let_in(folder.root(), folder.root()).map_err(unfit)?;
    }
    drop(clear_predecessor(&folder, Some(&ram_dir), false)?);
    let before = folder.record_if_any()?;
    let room = |folder: &Path| context.ram_room(&args.name, folder, args.overcommit);
    let owned_ram = make_ram_files(&plan.regions, 0, room)?;
    let launched = launch(
        &program,
        &plan,
        &here,
        &folder.file("console.log"),
        &qmp_path,
        Inherited::default(),
    )
    .inspect_err(|_| remove_files(&owned_ram))?;
    let started = (program, arguments);
    let record = GuestRecord::new(&args.name, launched.process, started, here, qmp_path);
    let mut record = GuestRecord { ram: ram_files(&plan.regions), owned_ram, ..record };
    let taken = take(&folder, &mut record, launched.qmp);
    if taken.is_err() {
        end(&folder, &record, before);
    }
    taken?;
    let stands = Qmp::of(&record).ok().and_then(|mut qmp| RunState::of(&mut qmp).ok());
    if let Some(why) = stands.as_ref().and_then(RunState::why_not_running) {
        let _ = writeln!(std::io::stderr(), "dewar: the guest {why}");
    }
    let refused = what_is_refused(&folder, &record);
    if let Some(why) = &refused {
        // Nobody may be there to hear it.
        let _ = writeln!(
            std::io::stderr(),
            "dewar: no checkpoint of it can be taken: {}",
            printable(why)
        );
    }
    let bytes: u64 = record.ram.iter().map(|file| file.bytes).sum();
    context.print(
        json!({"name": record.name, "pid": record.process.pid, "memory_bytes": bytes,
            "no_checkpoint": refused}),
        &format!(
            "{} runs as process {} with {} of RAM; its console is in {}",
            record.name,
            record.process.pid,
            ByteSize(bytes),
            folder.file("console.log").display()
        ),
    );
    Ok(())
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
fn take(folder: &GuestFolder, record: &mut GuestRecord, mut qmp: Qmp) -> Result<(), Failure> {
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
    let _ = match before {
        Some(before) => folder.set_record(&before),
        None => folder.remove("guest.json"),
    };
}

pub fn ram_files(regions: &[PlannedRegion]) -> Vec<RamFile> {
    regions
        .iter()
        .map(|region| RamFile {
            id: region.id.clone(),
            path: region.path.clone(),
            bytes: region.bytes,
        })
        .collect()
}

fn split_command(command: Vec<std::ffi::OsString>) -> Result<(PathBuf, Vec<String>), Failure> {
    let mut words = command.into_iter();
    let name = words.next().unwrap_or_default();
    if name.as_encoded_bytes().starts_with(b"-") {
        let what = format!("'{}' is no program", name.to_string_lossy());
        return Err(Failure::new(Code::Usage, what).advice(
            "name QEMU before its options: dewar run NAME -- qemu-system-x86_64 -m 2G ...",
        ));
    }
    let arguments = words
        .map(|word| {
            word.into_string().map_err(|word| {
                let what = format!("argument {} is not UTF-8", word.to_string_lossy());
                Failure::new(Code::Unsupported, what)
            })
        })
        .collect::<Result<_, _>>()?;
    Ok((find_program(Path::new(&name))?, arguments))
}

/// The file of a program that is named as in a shell.
pub fn find_program(path: &Path) -> Result<PathBuf, Failure> {
    let found = if path.components().count() > 1 {
        std::path::absolute(path).ok().filter(|path| path.is_file())
    } else {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&folders).map(|folder| folder.join(path)).find(|it| it.is_file())
    };
    let missing = || {
        Failure::new(Code::Failed, format!("there is no program {}", path.display()))
            .advice("install QEMU (Debian: qemu-system-x86)")
    };
    found.ok_or_else(missing)
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
