//! The processes of a container: its runtime is asked how they are, and ends them.
//!
//! What a dead command left is a CRIU that holds the container, or a container that was being restored:
//! the next command ends either ([`crate::recovery`]).

use crate::failure::{Code, Failure};
use crate::ram_dir::ram_dir;
use dewar_guest_oci::{
    Container, ContainerState, OciError, Overlay, Podman, Status, Strays, restored_process,
    unmount_from,
};
use dewar_registry::{GuestFolder, GuestRecord, Phase, ProcessId};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Says that a command saves the container now, and on which port CRIU waits for it.
pub(crate) const DUMP: &str = "dump.json";
/// How often it is looked whether a container has ended.
const LOOK: Duration = Duration::from_millis(50);

impl From<OciError> for Failure {
    fn from(error: OciError) -> Self {
        let code = match error {
            OciError::NoSuchContainer { .. } => Code::NotFound,
            OciError::Unsupported { .. } | OciError::NoRuntime { .. } => Code::Unsupported,
            _ => Code::Failed,
        };
        let failure = Self::new(code, error.to_string());
        match error.advice() {
            Some(advice) => failure.advice(advice),
            None => failure,
        }
    }
}

/// That a guest is a virtual machine: what is done next is for those only.
///
/// # Errors
/// Where it is a container.
pub fn require_machine(record: &GuestRecord) -> Result<(), Failure> {
    match record.container {
        None => Ok(()),
        Some(_) => Err(Failure::new(
            Code::Unsupported,
            format!("'{}' is a container, and this is for virtual machines", record.name),
        )
        .state("the container was not touched")),
    }
}

/// By what the processes of a dump are known.
pub(crate) fn strays(folder: &GuestFolder) -> Strays {
    Strays::of(folder.unique_name())
}

/// The folder for a container's images: memory, as large as that of its processes.
pub(crate) fn images_folder(folder: &GuestFolder) -> PathBuf {
    folder.ram_file(&ram_dir(None), "criu")
}

/// Finishes what a dead command left with a container. Says whether the record is of a container.
///
/// # Errors
/// Where it cannot be finished.
pub(crate) fn recover(folder: &GuestFolder, record: &GuestRecord) -> Result<bool, Failure> {
    let Some(known) = &record.container else { return Ok(false) };
    if record.phase == Phase::Restoring {
        // The runtime may still be at work: what it makes is known when it has ended.
        Podman::end_restores(&images_folder(folder));
        require_gone(strays(folder).end_all())?;
        let container = Container::of(known);
        let state = container.state_if_any()?;
        let ours = restored_process(&images_folder(folder));
        let images = images_folder(folder);
        let is_ours = |it: ContainerState| match (it.status, &container.podman) {
            // Its user may have started it since.
            (Status::Running | Status::Paused, Some(_)) => {
                Podman::was_restored_from(&images, it.pid)
            }
            (Status::Created, Some(_)) | (Status::Stopped, _) => true,
            _ => Some(it.pid) == ours,
        };
        if state.is_some_and(is_ours) {
            container.delete()?;
        }
        folder.set_record(&GuestRecord { phase: Phase::Running, ..record.clone() })?;
    }
    let_run(folder, record)?;
    Ok(true)
}

/// Lets a container run that a dead command was saving.
///
/// # Errors
/// Where what that command started does not end; the next command tries again.
pub(crate) fn let_run(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    let dump = folder.read::<u16>(DUMP);
    if !matches!(dump, Ok(None)) {
        let left = match dump {
            Ok(Some(port)) => strays(folder).with_port(port),
            _ => strays(folder),
        };
        require_gone(left.end(record.process))?;
        if let Some(known) = &record.container {
            resume_if_frozen(&Container::of(known), &record.process);
        }
        let _ = folder.remove(DUMP);
    }
    let _ = remove_folder(&images_folder(folder));
    Ok(())
}

fn require_gone(is_gone: bool) -> Result<(), Failure> {
    match is_gone {
        true => Ok(()),
        false => Err(Failure::new(Code::Attention, "a CRIU of a dead command does not end")
            .state("the container may stand still")
            .advice("'dewar ps' tries again")),
    }
}

/// Thaws a container that a killed CRIU left frozen: its user's own pause is refused before a dump begins.
pub(crate) fn resume_if_frozen(container: &Container, process: &ProcessId) {
    let state = container.state_if_any();
    let is_it = |it: &ContainerState| it.pid == process.pid && process.is_alive();
    if matches!(state, Ok(Some(state)) if state.status == Status::Paused && is_it(&state)) {
        let _ = container.runtime.resume(&container.id);
    }
}

/// Asks a container to end, and waits; says whether it did.
///
/// # Errors
/// Where the runtime cannot be asked.
pub fn ask_to_end(record: &GuestRecord, timeout: Duration) -> Result<bool, Failure> {
    let Some(known) = &record.container else { return Ok(false) };
    Container::of(known).kill("TERM")?;
    let deadline = Instant::now() + timeout;
    while Instant::now() < deadline {
        if record.process.ends_within(LOOK) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Ends a container, whatever state it is in; its runtime forgets it. One that was started under its id since is
/// another, and left alone.
///
/// # Errors
/// Where it does not end.
pub(crate) fn end(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    let Some(known) = &record.container else { return Ok(()) };
    recover(folder, record)?;
    let container = Container::of(known);
    if let Some(state) = container.state_if_any()? {
        if state.status == Status::Stopped || state.pid == record.process.pid {
            container.end()?;
        }
    }
    Ok(())
}

/// Takes away the root file systems that restored containers had of us; the user's own is as it was.
///
/// # Errors
/// Where one is in use still: by a container that somebody else started there, or below another mount.
pub fn unmount_files(folder: &GuestFolder) -> Result<(), Failure> {
    let is_ours = |overlay: &Overlay| is_ours(folder, overlay);
    if Overlay::roots().iter().any(is_ours) {
        return Err(files_in_use(folder));
    }
    for (place, overlay) in Overlay::all()? {
        if is_ours(&overlay) {
            let last = Overlay::mounted_on(&place)?;
            if !last.is_some_and(|last| is_ours(&last)) {
                return Err(files_in_use(folder));
            }
            unmount_from(&place)?;
        }
    }
    Ok(())
}

pub(crate) fn files_in_use(folder: &GuestFolder) -> Failure {
    let what = format!("what '{}' wrote to its root file system is in use", folder.name());
    Failure::new(Code::Failed, what)
        .state("it was left as it is")
        .advice("end the container that runs there")
}

/// Where what a restored container writes to its root file system may lie: one after the other.
pub(crate) fn root_folders(folder: &GuestFolder) -> [PathBuf; 2] {
    ["root-a", "root-b"].map(|name| folder.file(name))
}

/// Whether an overlay was mounted by a restore of the guest.
pub(crate) fn is_ours(folder: &GuestFolder, overlay: &Overlay) -> bool {
    root_folders(folder).iter().any(|it| overlay.upper.starts_with(it))
}

/// Bytes of memory that a guest has: those of its RAM files, or what the processes of a container have for themselves
/// now.
pub fn memory_bytes(record: &GuestRecord) -> u64 {
    match &record.container {
        Some(known) => Container::of(known).memory_bytes().unwrap_or(0),
        None => record.ram.iter().map(|file| file.bytes).sum(),
    }
}

/// One word for how a container is.
pub fn state(record: &GuestRecord) -> Option<String> {
    let known = record.container.as_ref()?;
    let state = Container::of(known).state_if_any();
    Some(match state {
        Ok(Some(state)) if state.pid == record.process.pid => state.status.to_string(),
        Ok(_) => "ended".to_owned(),
        Err(_) => "silent".to_owned(),
    })
}

/// Makes a folder anew.
///
/// # Errors
/// Where it cannot be made.
pub(crate) fn make_folder(path: &Path) -> Result<(), Failure> {
    let failed = |error: io::Error| {
        Failure::new(Code::Failed, format!("cannot make {}: {error}", path.display()))
    };
    remove_folder(path).and_then(|()| DirBuilder::new().mode(0o700).create(path)).map_err(failed)
}

/// Removes a folder with all that is in it; one that is not there is as good.
///
/// # Errors
/// Where it cannot be removed.
pub(crate) fn remove_folder(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
