//! The processes of a container: its runtime is asked how they are, and ends them.
//!
//! What a dead command left is a CRIU that holds the container, or a container that was being restored:
//! the next command ends either ([`crate::recovery`]).

use crate::failure::{Code, Failure};
use crate::ram_dir::ram_dir;
use dewar_guest_oci::{Container, OciError, Overlay, Strays, unmount_from};
use dewar_registry::{GuestFolder, GuestRecord, Phase};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Says that a command saves the container now.
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
        Container::of(known).runtime.delete(&known.id)?;
        folder.set_record(&GuestRecord { phase: Phase::Running, ..record.clone() })?;
    }
    let_run(folder, record);
    Ok(true)
}

/// Lets a container run that a dead command was saving.
pub(crate) fn let_run(folder: &GuestFolder, record: &GuestRecord) {
    if !matches!(folder.read::<()>(DUMP), Ok(None)) {
        strays(folder).end(record.process);
        let _ = folder.remove(DUMP);
    }
    let _ = remove_folder(&images_folder(folder));
}

/// Asks a container to end, and waits; says whether it did.
///
/// # Errors
/// Where the runtime cannot be asked.
pub fn ask_to_end(record: &GuestRecord, timeout: Duration) -> Result<bool, Failure> {
    let Some(known) = &record.container else { return Ok(false) };
    Container::of(known).runtime.kill(&known.id, "TERM")?;
    let deadline = Instant::now() + timeout;
    while Instant::now() < deadline {
        if record.process.ends_within(LOOK) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Ends a container, whatever state it is in; its runtime forgets it.
///
/// # Errors
/// Where it does not end.
pub(crate) fn end(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    if let Some(known) = &record.container {
        recover(folder, record)?;
        Container::of(known).runtime.delete(&known.id)?;
    }
    Ok(())
}

/// Takes away the root file system that a restored container had of us; the user's own is as it was.
///
/// # Errors
/// Where something still uses it.
pub fn unmount_files(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    let Some(known) = &record.container else { return Ok(()) };
    let container = Container::of(known);
    // Without a configuration there is no root file system.
    let Ok(config) = container.config() else { return Ok(()) };
    let rootfs = container.rootfs(&config);
    match Overlay::mounted_on(&rootfs) {
        Ok(Some(overlay)) if is_ours(folder, &overlay) => Ok(unmount_from(&rootfs)?),
        _ => Ok(()),
    }
}

/// Where what a restored container writes to its root file system may lie: one after the other.
pub(crate) fn root_folders(folder: &GuestFolder) -> [PathBuf; 2] {
    ["root-a", "root-b"].map(|name| folder.file(name))
}

/// Whether an overlay was mounted by a restore of the guest.
pub(crate) fn is_ours(folder: &GuestFolder, overlay: &Overlay) -> bool {
    root_folders(folder).iter().any(|it| overlay.upper.starts_with(it))
}

/// One word for how a container is.
pub fn state(record: &GuestRecord) -> Option<String> {
    let known = record.container.as_ref()?;
    let state = Container::of(known).runtime.state_if_any(&known.id);
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
    remove_folder(path).and_then(|()| fs::create_dir(path)).map_err(failed)
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
