//! What a hand-over needs, found out before anything is touched.

use super::error::HandoverError;
use super::inherited_files::OpenFiles;
use super::tap::TapHeader;
use super::under_way::SOCKET;
use crate::cmdline::{
    RunPlan, TakeoverPlan, Unsupported, arguments, plan_run, take_over, without_ram_paths,
};
use crate::discover::maps_file;
use crate::disks::mirror::is_mirror;
use crate::guest::QemuGuest;
use crate::machine::command_line::current_line;
use crate::machine::disks::stale_disk;
use crate::machine::forwards;
use crate::namespaces::is_same_namespace;
use crate::qmp::Qmp;
use crate::run_state::ASLEEP;
use dewar_registry::{Forward, GuestRecord, RamFile};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const TERMINAL: &str = "it leaves the terminal that it was started on: what it prints there \
                        goes to its console.log, and nobody types to it";
/// A hand-over that can be begun.
#[derive(Debug)]
pub struct Plan {
    /// The program of the new QEMU.
    pub(super) program: PathBuf,
    /// The guest's own command line, as it is now.
    pub(super) line: Vec<String>,
    pub(super) run: RunPlan,
    /// The guest's RAM, in the order of its pages.
    pub(super) ram: Vec<RamFile>,
    /// Files that the new QEMU inherits.
    pub(super) files: Vec<OwnedFd>,
    /// The taps, and copies of them.
    pub(super) headers: (Vec<TapHeader>, Vec<OwnedFd>),
    pub(super) taken: TakeoverPlan,
    pub(super) forwards: Vec<Forward>,
    /// Whether QEMU tracks writes to disks, so that the tracking moves too.
    pub(super) bitmaps: bool,
    /// The network namespace that the new QEMU is to begin in, where it is not ours.
    pub(super) network: Option<OwnedFd>,
}

impl Plan {
    /// Plans how `program` takes a guest over.
    ///
    /// # Errors
    /// [`HandoverError::Unsupported`] with the reason why it cannot.
    pub fn new(guest: &mut QemuGuest, program: &Path) -> Result<Self, HandoverError> {
        let record = guest.record().clone();
        let unfit = |why: String| HandoverError::Unsupported(record.name.clone(), why);
        refuse_what_is_under_way(guest)?;
        refuse_another_user(&record)?;
        refuse_other_files(guest)?;
        let network = other_network(record.process.pid).map_err(|error| {
            unfit(format!("its network namespace cannot be looked at: {error}"))
        })?;
        let scratch = guest.folder.file("");
        let (qmp, process) = (&mut guest.qmp, &guest.process);
        let line = current_line(qmp, &record.arguments, &record.folder)
            .map_err(|error| unfit(error.to_string()))?;
        if let Some(why) = stale_disk(qmp, &record, &line)? {
            return Err(unfit(why));
        }
        if let Some(why) = full_server(qmp)? {
            return Err(unfit(why));
        }
        let forwards = forwards::forwards(qmp)?;
        let mut files = OpenFiles::of(process, qmp)
            .map_err(|error| unfit(format!("its open files: {error}")))?;
        let known = &record.descriptors;
        let mut taken = take_over(&line, &record.folder, &scratch, Some(&mut files), known)
            .map_err(|why| unfit(why.to_string()))?;
        if let Some((host, port)) = unnamed_vnc(qmp, &line) {
            taken.vnc_at(&host, &port, &scratch);
        }
        if record.adopted && is_on_terminal(&line) {
            taken.losses.push(TERMINAL.to_owned());
        }
        let (machine, socket) = (&guest.found.machine, guest.folder.file(SOCKET));
        let run = plan_on_its_ram(&taken.line, &record, machine, &socket)
            .map_err(|why| unfit(why.to_string()))?;
        let ram = named_ram(&record, &run).map_err(unfit)?;
        let OpenFiles { claimed: files, headers, all_taps, .. } = files;
        let bitmaps = has_bitmaps(guest)?;
        let program = program.to_owned();
        let headers = (headers, all_taps);
        Ok(Self { program, line, run, ram, files, headers, taken, forwards, bitmaps, network })
    }

    /// What the guest's users will lose, each a sentence.
    pub fn losses(&self) -> &[String] {
        &self.taken.losses
    }
}

/// The first disk on a server that does not serve another QEMU beside the present one.
fn full_server(qmp: &mut Qmp) -> Result<Option<String>, HandoverError> {
    let blocks = qmp.execute("query-block", json!({}))?;
    let files = blocks.as_array().into_iter().flatten();
    let mut files = files.filter_map(|block| block["inserted"]["file"].as_str());
    Ok(files.find(|file| crate::nbd::is_full(file)).map(|file| {
        format!(
            "disk {file} is on an NBD server that serves no second client, and both QEMUs need it \
             for a moment: let it serve more ('qemu-nbd --shared=2')"
        )
    }))
}

/// Where a guest's display is that QEMU has over VNC because no option names one, and it
/// was built, or installed, without windows (`qemu_create_default_display`, "to=99").
fn unnamed_vnc(qmp: &mut Qmp, line: &[String]) -> Option<(String, String)> {
    let names_one = ["display", "vnc", "nographic", "spice"];
    if arguments(line).iter().any(|argument| names_one.contains(&argument.name)) {
        return None;
    }
    let answer = qmp.execute("query-vnc", json!({})).ok()?;
    let text = |key: &str| Some(answer[key].as_str()?.to_owned());
    (answer["enabled"] == true).then(|| text("host").zip(text("service")))?
}

/// Whether a QEMU has the terminal that it was started on.
fn is_on_terminal(line: &[String]) -> bool {
    let ports = ["serial", "parallel", "monitor", "qmp", "qmp-pretty", "debugcon", "chardev"];
    arguments(line).iter().any(|argument| {
        let value = argument.value.unwrap_or_default();
        argument.name == "nographic"
            || ports.contains(&argument.name)
                && value.trim_start_matches("mon:").split(',').next() == Some("stdio")
    })
}

/// What must end before a guest can leave its QEMU.
pub(crate) fn refuse_what_is_under_way(guest: &mut QemuGuest) -> Result<(), HandoverError> {
    refuse_all_but(guest, |_| false)
}

/// The same but for our own copies of its disks to another host.
pub(crate) fn refuse_all_but_mirrors(guest: &mut QemuGuest) -> Result<(), HandoverError> {
    refuse_all_but(guest, is_mirror)
}

fn refuse_all_but(
    guest: &mut QemuGuest,
    allowed: impl Fn(&Value) -> bool,
) -> Result<(), HandoverError> {
    let mut ask = |command: &str| guest.qmp.execute(command, json!({}));
    let (jobs, exports) = (ask("query-block-jobs")?, ask("query-block-exports")?);
    let status = ask("query-status")?;
    let migrating = crate::state::is_migrating(&mut guest.qmp)?;
    let of_others = |job: &&Value| !allowed(job);
    let first = |list: &Value| list.as_array().and_then(|all| all.iter().find(of_others)).cloned();
    let why = if migrating {
        "a migration of it is under way".to_owned()
    } else if let Some(job) = first(&jobs) {
        format!("block job {} is under way", job["device"])
    } else if let Some(export) = first(&exports) {
        format!("disk {} is exported", export["node-name"])
    } else if status["status"] == "postmigrate" {
        "it stands still since its state was saved; let it run first".to_owned()
    } else if status["status"] == "suspended" {
        ASLEEP.to_owned()
    } else {
        return Ok(());
    };
    Err(HandoverError::Unsupported(guest.record().name.clone(), why))
}

/// That a QEMU that we start has the rights of the one that the guest has: one of root's in
/// the place of a user's could do more than it should, and the other way round less than
/// it must.
pub(crate) fn refuse_another_user(record: &GuestRecord) -> Result<(), HandoverError> {
    // It changes its user by itself.
    let changes = crate::qemu_user::named(&record.arguments).is_some();
    let user_of = |process: i32| {
        let status = procfs::process::Process::new(process).and_then(|it| it.status());
        status.ok().map(|status| status.euid)
    };
    let (theirs, ours) = (user_of(record.process.pid), rustix::process::geteuid().as_raw());
    match theirs {
        Some(theirs) if theirs != ours && !changes => {
            let why = format!(
                "its QEMU runs as user {theirs}, and another would run as user {ours}: do it as \
                 that user"
            );
            Err(HandoverError::Unsupported(record.name.clone(), why))
        }
        _ => Ok(()),
    }
}

/// That the names of a guest's files mean to us, and to a QEMU that we start, what they mean
/// to its own: it may be in another mount namespace.
pub(crate) fn refuse_other_files(guest: &QemuGuest) -> Result<(), HandoverError> {
    let record = guest.record();
    let pid = record.process.pid;
    if is_same_namespace(pid, "mnt") {
        return Ok(());
    }
    let of = |path: PathBuf| fs::metadata(path).map(|data| (data.dev(), data.ino())).ok();
    let theirs = |path: &Path| {
        let below = path.strip_prefix("/").unwrap_or(path);
        of(Path::new(&format!("/proc/{pid}/root")).join(below))
    };
    let disks = guest.found.disks.iter().map(|disk| record.folder.join(&disk.file));
    let ram = record.ram.iter().map(|file| file.path.clone());
    let files = [record.folder.clone(), record.program.clone()].into_iter().chain(ram).chain(disks);
    match files.into_iter().find(|path| theirs(path) != of(path.clone())) {
        None => Ok(()),
        Some(path) => {
            let why = format!(
                "its QEMU has another {} than 'dewar' (it is in another mount namespace): do it \
                 from within ('nsenter -t {pid} -m -n dewar ...')",
                path.display()
            );
            Err(HandoverError::Unsupported(record.name.clone(), why))
        }
    }
}

/// That a QEMU that we start later is in the network that the guest has now.
pub(crate) fn refuse_other_network(record: &GuestRecord) -> Result<(), HandoverError> {
    if is_same_namespace(record.process.pid, "net") {
        return Ok(());
    }
    let why = format!(
        "its QEMU is in another network namespace, and would not be when it is thawed: freeze and \
         thaw it from within ('nsenter --net=/proc/{}/ns/net dewar ...')",
        record.process.pid
    );
    Err(HandoverError::Unsupported(record.name.clone(), why))
}

/// The network namespace of a process, where it is not ours.
fn other_network(process: i32) -> std::io::Result<Option<OwnedFd>> {
    if is_same_namespace(process, "net") {
        return Ok(None);
    }
    File::open(format!("/proc/{process}/ns/net")).map(|file| Some(file.into()))
}

/// That a guest is still what `line`, its present command line of a while ago, says:
/// nobody keeps its user from plugging and from taking snapshots.
pub(crate) fn refuse_what_changed(
    guest: &mut QemuGuest,
    line: &[String],
) -> Result<(), HandoverError> {
    let record = guest.record().clone();
    let unfit = |why: String| HandoverError::Unsupported(record.name.clone(), why);
    let now = current_line(&mut guest.qmp, &record.arguments, &record.folder);
    if now.map_err(|error| unfit(error.to_string()))? != line {
        return Err(unfit("what it is made of was changed meanwhile; try again".to_owned()));
    }
    stale_disk(&mut guest.qmp, &record, line)?.map_or(Ok(()), |why| Err(unfit(why)))
}

/// Plans a command line on the RAM files that a guest has, waiting for its state:
/// what its line says of files may be older. The machine type is pinned to `machine`.
pub(crate) fn plan_on_its_ram(
    line: &[String],
    record: &GuestRecord,
    machine: &str,
    socket: &Path,
) -> Result<RunPlan, Unsupported> {
    let path_of = |id: &str| record.ram.iter().find(|file| file.id == id).map(|file| &file.path);
    let owned = |id: &str| path_of(id).is_some_and(|path| record.owned_ram.contains(path));
    let line = without_ram_paths(line, &owned)?;
    let mut run = plan_run(&line, socket, |id| path_of(id).cloned().unwrap_or_default())?;
    let machine = format!("type={machine}");
    run.arguments.extend(["-machine", &machine, "-incoming", "defer"].map(str::to_owned));
    Ok(run)
}

/// A guest's RAM with the files' whole paths, or why it cannot be found by them.
pub(crate) fn named_ram(record: &GuestRecord, run: &RunPlan) -> Result<Vec<RamFile>, String> {
    let named = |file: &RamFile| {
        let planned = run.regions.iter().find(|region| region.id == file.id);
        let path = planned.map_or_else(PathBuf::new, |it| record.folder.join(&it.path));
        if maps_file(record.process.pid, &path) {
            Ok(RamFile { path, ..file.clone() })
        } else {
            Err(format!("its RAM '{}' is not the file {}", file.id, path.display()))
        }
    };
    record.ram.iter().map(named).collect()
}

fn has_bitmaps(guest: &mut QemuGuest) -> Result<bool, HandoverError> {
    let nodes = guest.qmp.execute("query-named-block-nodes", json!({"flat": true}))?;
    let has = |node: &Value| node["dirty-bitmaps"].as_array().is_some_and(|it| !it.is_empty());
    Ok(nodes.as_array().is_some_and(|nodes| nodes.iter().any(has)))
}
