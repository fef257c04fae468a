//! A container is brought back from a checkpoint.

use super::root::RestoredRoot;
use crate::container_process::{images_folder, make_folder, remove_folder};
use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::locked_guest::{LockedGuest, NextGuest, clear_predecessor};
use crate::reporter::Reporter;
use dewar_checkpoint::restore::{DeadRam, fill_files};
use dewar_guest_oci::{Container, Description, Preconditions, RestoreOptions, Status};
use dewar_image::{ImageId, ImageReader, Store};
use dewar_registry::{GuestRecord, Origin, Phase, ProcessId};
use dewar_units::PAGE_BYTES;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// How a container shall be brought back.
#[derive(Debug, Clone)]
pub struct ContainerRestore {
    /// A name for the guest; without one it has the one that it had. The runtime knows the container by its id.
    pub name: Option<String>,
    /// Whether the container that has the name, or the id, is ended for it.
    pub replace: bool,
}

/// Brings a container back. Returns the guest's record.
///
/// # Errors
/// Where it does not come back; the failure says what became of the one before.
pub fn restore(
    host: &Host,
    store: &Store,
    id: &ImageId,
    options: &ContainerRestore,
    reporter: &dyn Reporter,
) -> Result<GuestRecord, Failure> {
    let image = store.open_image(id)?;
    let unreadable = |error: serde_json::Error| {
        Failure::new(Code::Failed, format!("checkpoint {id} describes no container: {error}"))
    };
    let description = Description::parse(image.record().machine.clone()).map_err(unreadable)?;
    let container = description.container();
    let name = options.name.clone().unwrap_or_else(|| image.record().guest.clone());
    require_host(&container)?;
    let folder = host.registry.guest(&name)?;
    let lock = folder.lock()?;
    let before = folder.record_if_any()?;
    let state = image.blob("state of the processes", &image.record().device_state)?;
    image.require_segments()?;
    if let Some(record) = before.clone().filter(|_| options.replace) {
        let mut held = LockedGuest { folder: folder.clone(), record, lock };
        held.end()?;
        drop(held.lock);
    } else {
        drop(lock);
    }
    let _lock = folder.lock()?;
    drop(clear_predecessor(&folder, None, NextGuest::Another)?);
    clear_container(&container, options.replace)?;
    let record = GuestRecord {
        phase: Phase::Restoring,
        adopted: false,
        origin: Some(Origin {
            store: store.url(),
            image: id.0.clone(),
            disks: Vec::new(),
            in_store: store.folder().is_some(),
        }),
        // Until it runs it has no process.
        ..GuestRecord::new_container(
            &name,
            ProcessId { pid: 0, started: 0, boot: 0 },
            container.record(),
        )
    };
    folder.set_record(&record)?;
    let images = images_folder(&folder);
    let restored = RestoredRoot::mount(store, &image, &description, &folder).and_then(|root| {
        let process = load(&image, &container, &state, &images, reporter);
        match &process {
            Ok(_) => root.keep(),
            Err(_) => root.give_up(),
        }
        process
    });
    let _ = remove_folder(&images);
    match restored {
        Ok(process) => {
            let record = GuestRecord { phase: Phase::Running, process, ..record };
            folder.set_record(&record)?;
            Ok(record)
        }
        Err(failure) => {
            match &before {
                Some(before) => folder.set_record(before)?,
                None => folder.remove_all()?,
            }
            Err(failure.state("no container was started"))
        }
    }
}

fn require_host(container: &Container) -> Result<(), Failure> {
    Preconditions::of_host().require(container)?;
    let config = container.config_file();
    if !config.exists() {
        let what = format!("{} is missing", config.display());
        return Err(Failure::new(Code::Failed, what)
            .state("no container was started")
            .advice("put the container's bundle back"));
    }
    Ok(())
}

/// That the runtime knows no container by the id; one that has ended is forgotten.
fn clear_container(container: &Container, replace: bool) -> Result<(), Failure> {
    let Some(state) = container.runtime.state_if_any(&container.id)? else { return Ok(()) };
    if state.status != Status::Stopped && !replace {
        let what = format!("container '{}' is {}", container.id, state.status);
        return Err(Failure::new(Code::Failed, what)
            .state("it was left as it is")
            .advice("--replace ends it"));
    }
    Ok(container.runtime.delete(&container.id)?)
}

/// Puts the images together, and lets the runtime restore from them.
fn load(
    image: &ImageReader,
    container: &Container,
    state: &[u8],
    images: &Path,
    reporter: &dyn Reporter,
) -> Result<ProcessId, Failure> {
    let failed = |what: &'static str| {
        move |error: io::Error| Failure::new(Code::Failed, format!("{what}: {error}"))
    };
    make_folder(images)?;
    let inside = images.join("images");
    fs::create_dir(&inside).map_err(failed("making a folder in memory"))?;
    unpack(&inside, state).map_err(failed("unpacking the state of the processes"))?;
    reporter.stage("reading memory");
    let mut files = Vec::new();
    for region in &image.record().memory.regions {
        let file = new_file(&inside, &region.name, region.pages * PAGE_BYTES as u64);
        files.push(file.map_err(failed("making a file in memory"))?);
    }
    let none = DeadRam::new(image, Vec::new())?;
    fill_files(image, files, &none, reporter.observer())?;
    reporter.stage("restoring the processes");
    let options = RestoreOptions { folder: images.to_owned(), connections: false };
    Ok(dewar_guest_oci::restore(container, &options)?)
}

/// A file of pages, all of them zeros. The name is a stranger's.
fn new_file(folder: &Path, name: &str, bytes: u64) -> io::Result<File> {
    if name.contains('/') || !name.starts_with("pages-") {
        return Err(io::Error::other(format!("'{name}' is no file of pages")));
    }
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).open(folder.join(name))?;
    file.set_len(bytes)?;
    Ok(file)
}

fn unpack(folder: &Path, archive: &[u8]) -> io::Result<()> {
    let mut tar = Command::new("tar")
        .arg("--directory")
        .arg(folder)
        .args(["--extract", "--no-same-owner", "--file=-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let written = tar.stdin.take().map_or(Ok(()), |mut input| input.write_all(archive));
    let status = tar.wait()?;
    written?;
    match status.success() {
        true => Ok(()),
        false => Err(io::Error::other("the archive is damaged")),
    }
}
