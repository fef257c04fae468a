//! A container is brought back from a checkpoint.

use super::root::{RestoredRoot, with_archive};
use super::warming::Warming;
use crate::container_process::{images_folder, make_folder, remove_folder, strays};
use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::hot_pages::{self, HOT_PAGES};
use crate::locked_guest::{LockedGuest, NextGuest, require_ended};
use crate::reporter::Reporter;
use dewar_checkpoint::restore::{CrashedRam, fill_files};
use dewar_guest_oci::{Container, Description, Preconditions, RestoreOptions, Status};
use dewar_image::{ImageId, ImageReader, Store};
use dewar_kernel::free;
use dewar_registry::{GuestFolder, GuestRecord, Origin, Phase, ProcessId};
use dewar_units::{ByteSize, PAGE_BYTES};
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
    require_host(&description)?;
    description.require_processor()?;
    let folder = host.registry.guest(&name)?;
    let mut lock = folder.lock()?;
    require_no_other(host, &name, &container)?;
    // All that can be found wrong with the checkpoint is found before anything is ended for it.
    let state = image.blob("state of the processes", &image.record().device_state)?;
    image.require_segments()?;
    image.read_table_ahead()?;
    store.check_disks(image.record())?;
    require_room(&image, &images_folder(&folder))?;
    let mut ended = false;
    if let Some(record) = folder.record_if_any()?.filter(|_| options.replace) {
        let mut held = LockedGuest { folder: folder.clone(), record, lock };
        ended = held.record.process.is_alive();
        held.end()?;
        lock = held.lock;
    }
    let before = require_ended(&folder, NextGuest::Another)?;
    if let Some(machine) = before.as_ref().filter(|before| before.container.is_none()) {
        drop(folder.remove_ram(machine)?);
    }
    clear_container(&container, before.as_ref(), options.replace)?;
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
    let mut warming = None;
    let loading = Loading { folder: &folder, store, image: &image, description: &description };
    let restored = RestoredRoot::mount(store, &image, &description, &folder).and_then(|root| {
        let restored = loading.load(&state, &images, reporter, &mut warming);
        let restored = restored.and_then(|(container, process)| {
            let known = Some(container.record());
            let record = GuestRecord { phase: Phase::Running, process, container: known, ..record };
            // Before the folder goes that says which process it is.
            folder.set_record(&record).inspect_err(|_| {
                let _ = container.delete();
            })?;
            Ok(record)
        });
        match &restored {
            Ok(_) => root.keep(),
            Err(_) => root.give_up(),
        }
        restored
    });
    let _ = remove_folder(&images);
    match restored {
        Ok(record) => {
            match warming {
                Some(warming) => {
                    // It runs, whatever becomes of that.
                    if let Err(error) = folder.write(HOT_PAGES, warming.manifest()) {
                        reporter.warn(&error.to_string());
                    }
                    drop(lock);
                    reporter.stage("reading what it uses");
                    warming.finish();
                }
                None => drop(folder.remove(HOT_PAGES)),
            }
            Ok(record)
        }
        Err(failure) => {
            drop(warming);
            match &before {
                Some(before) => folder.set_record(before)?,
                None => folder.remove_all()?,
            }
            let state = match (ended, &description.podman) {
                (_, Some(_)) => {
                    "no container was started, and what podman had of the one before was removed; the checkpoint is whole"
                }
                (true, None) => "no container was started, and the one before was ended",
                (false, None) => "no container was started",
            };
            Err(failure.state(state))
        }
    }
}

pub(super) fn require_host(description: &Description) -> Result<(), Failure> {
    let container = description.container();
    Preconditions::of_host().require(&container)?;
    if let (Some(podman), Some(definition)) = (&description.podman, &description.definition) {
        return Ok(podman.require_ready(&container.id, definition, &container.bundle)?);
    }
    let config = container.config_file();
    if !config.exists() {
        let what = format!("{} is missing", config.display());
        return Err(Failure::new(Code::Failed, what)
            .state("no container was started")
            .advice("put the container's bundle back"));
    }
    Ok(())
}

/// That the container is no other guest's: two guests must not end each other's.
pub(super) fn require_no_other(
    host: &Host,
    name: &str,
    container: &Container,
) -> Result<(), Failure> {
    let wanted = container.record();
    let is_it = |record: &GuestRecord| {
        let known = record.container.as_ref();
        record.name != name && known.is_some_and(|it| it.id == wanted.id && it.root == wanted.root)
    };
    let other = host.guests()?.into_iter().map(|(_, record)| record).find(is_it);
    match other {
        None => Ok(()),
        Some(other) => {
            let (id, other) = (&wanted.id, &other.name);
            Err(Failure::new(Code::Failed, format!("container '{id}' is guest '{other}'"))
                .state("nothing was done")
                .advice(format!("'dewar rm {other}' forgets it")))
        }
    }
}

/// That there is room in memory for all pages.
fn require_room(image: &ImageReader, images: &Path) -> Result<(), Failure> {
    let needed = image.record().memory.pages * PAGE_BYTES as u64;
    let Some(Ok(room)) = images.parent().map(free) else { return Ok(()) };
    let room = room.file_system.min(room.memory.unwrap_or(u64::MAX));
    match needed < room {
        true => Ok(()),
        false => {
            let (needed, room) = (ByteSize(needed), ByteSize(room));
            let what = format!("its memory needs {needed}, and {room} are free");
            Err(Failure::new(Code::Unsupported, what).state("nothing was done"))
        }
    }
}

/// That the runtime knows no container by the id. One that has ended is forgotten, if it was the guest's.
pub(super) fn clear_container(
    container: &Container,
    before: Option<&GuestRecord>,
    replace: bool,
) -> Result<(), Failure> {
    let Some(state) = container.state_if_any()? else { return Ok(()) };
    let known = before.and_then(|it| it.container.as_ref());
    let is_known = known.is_some_and(|it| it.id == container.id);
    let has_ended = state.status == Status::Stopped && is_known;
    if !replace && !has_ended {
        let what = format!("container '{}' is {}", container.id, state.status);
        return Err(Failure::new(Code::Failed, what)
            .state("it was left as it is")
            .advice("--replace ends it"));
    }
    Ok(container.delete()?)
}

/// A checkpoint on its way into a container.
struct Loading<'l> {
    folder: &'l GuestFolder,
    store: &'l Store,
    image: &'l ImageReader,
    description: &'l Description,
}

impl Loading<'_> {
    /// Puts the images together, and lets the runtime restore from them.
    fn load(
        &self,
        state: &[u8],
        images: &Path,
        reporter: &dyn Reporter,
        warming: &mut Option<Warming>,
    ) -> Result<(Container, ProcessId), Failure> {
        let failed = |what: &'static str| {
            move |error: io::Error| Failure::new(Code::Failed, format!("{what}: {error}"))
        };
        make_folder(images)?;
        let inside = images.join("images");
        fs::create_dir(&inside).map_err(failed("making a folder in memory"))?;
        unpack(&inside, state).map_err(failed("unpacking the state of the processes"))?;
        let known = hot_pages::read(&inside.join(HOT_PAGES));
        let container = self.description.container();
        // podman mounts the files that are read when it brings the container back.
        let known = match &self.description.definition {
            None => {
                *warming = Warming::start(&container, known, reporter);
                None
            }
            Some(_) => Some(known),
        };
        reporter.stage("reading memory");
        let mut files = Vec::new();
        for region in &self.image.record().memory.regions {
            let file = new_file(&inside, &region.name, region.pages * PAGE_BYTES as u64);
            files.push(file.map_err(failed("making a file in memory"))?);
        }
        let none = CrashedRam::new(self.image, Vec::new())?;
        fill_files(self.image, files, &none, reporter.observer())?;
        if let Some(definition) = &self.description.definition {
            with_archive(self.store, self.image, self.folder, |archive| {
                Ok(definition.put_together(images, archive)?)
            })?;
        }
        reporter.stage("restoring the processes");
        let options = RestoreOptions {
            folder: images.to_owned(),
            strays: strays(self.folder),
            connections: false,
        };
        let restored = dewar_guest_oci::restore(&container, &options)?;
        if let Some(known) = known {
            *warming = Warming::start(&restored.0, known, reporter);
        }
        Ok(restored)
    }
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

pub(super) fn unpack(folder: &Path, archive: &[u8]) -> io::Result<()> {
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
