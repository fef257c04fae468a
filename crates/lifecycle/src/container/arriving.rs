//! A container that comes from another host: the place for it, and its last step.
//!
//! It is restored before it is this host's, so that all that can fail has not failed: CRIU stands before the last
//! step, in which the container runs ([`HeldRestore`]).

use super::leaving::STAGING_INDEX;
use super::restore::{clear_container, require_host, require_no_other, unpack};
use super::root::RestoredRoot;
use crate::container_process::{images_folder, make_folder, remove_folder, strays, unmount_files};
use crate::failure::{Code, Failure};
use crate::host::Host;
use dewar_guest_oci::{
    Container, Description, HeldRestore, Network, ROOT_FILES, RestoreOptions, StagingIndex,
    discard, finish, has_own_network, staging_file,
};
use dewar_kernel::available_memory;
use dewar_memory::NewRam;
use dewar_registry::{GuestFolder, GuestRecord, Phase, ProcessId};
use dewar_units::ByteSize;
use serde_json::Value;
use std::fs::{self, File};

/// Most bytes that the copies of a container may be said to take: the file has holes.
const MOST_COPIES: u64 = 1 << 42;

/// That a container can come to this host.
///
/// # Errors
/// Where it cannot; nothing was done.
pub(crate) fn require_place(
    host: &Host,
    name: &str,
    description: &Description,
    memory_bytes: u64,
) -> Result<(), Failure> {
    let container = description.container();
    require_host(description)?;
    description.require_processor()?;
    require_no_other(host, name, &container)?;
    clear_container(&container, None, false)?;
    if description.podman.is_none() {
        // podman makes these anew.
        require_same_places(&container, &description.config)?;
    }
    // CRIU copies the pages once more.
    let needed = memory_bytes.saturating_mul(2);
    let room = available_memory().unwrap_or(u64::MAX);
    match needed < room {
        true => Ok(()),
        false => {
            let what = format!(
                "its memory, twice for a moment, needs {}, and {} are free",
                ByteSize(needed),
                ByteSize(room)
            );
            Err(Failure::new(Code::Unsupported, what))
        }
    }
}

/// That the bundle, the root file system and the network are here, as they are at the other host.
fn require_same_places(container: &Container, config: &Value) -> Result<(), Failure> {
    require_same_config(container, config)?;
    let rootfs = container.rootfs(config);
    if !rootfs.is_dir() {
        return Err(missing("its root file system", &rootfs.display().to_string()));
    }
    let Some(network) = Network::named(config) else { return Ok(()) };
    let others = network.users();
    match others.is_empty() {
        true => Ok(()),
        false => {
            let others = programs(&others);
            let what = format!("its network namespace is in use on this host: {others}");
            Err(Failure::new(Code::Unsupported, what))
        }
    }
}

/// Processes, for people.
pub(crate) fn programs(pids: &[i32]) -> String {
    let program = |pid: &i32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        format!("{} ({pid})", name.trim())
    };
    pids.iter().take(3).map(program).collect::<Vec<_>>().join(", ")
}

fn require_same_config(container: &Container, config: &Value) -> Result<(), Failure> {
    if container.config()? == *config {
        return Ok(());
    }
    let what = format!("{} is another one on this host", container.config_file().display());
    Err(Failure::new(Code::Unsupported, what)
        .advice("let both hosts have the same bundle, on shared storage or copied"))
}

fn missing(what: &str, path: &str) -> Failure {
    Failure::new(Code::Unsupported, format!("{what}, {path}, is not on this host"))
        .advice("let both hosts reach it by this path, on shared storage, or copy it")
}

/// The record of a container that comes, and the file for its copies.
///
/// # Errors
/// Where there is no room for it. Nothing is left then.
pub(crate) fn make_place(
    folder: &GuestFolder,
    description: &Description,
    session: u64,
    bytes: u64,
) -> Result<(GuestRecord, NewRam), Failure> {
    let nobody = ProcessId { pid: 0, started: 0, boot: 0 };
    let record = GuestRecord {
        phase: Phase::Arriving,
        migration: Some(session),
        ..GuestRecord::new_container(folder.name(), nobody, description.container().record())
    };
    let images = images_folder(folder);
    let made = || -> Result<NewRam, Failure> {
        if bytes > MOST_COPIES {
            let what = format!("{} of copies are too many", ByteSize(bytes));
            return Err(Failure::new(Code::Unsupported, what));
        }
        make_folder(&images)?;
        let path = staging_file(&images);
        let failed = |error: &dyn std::fmt::Display| {
            Failure::new(Code::Failed, format!("{}: {error}", path.display()))
        };
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(|error| failed(&error))?;
        file.set_len(bytes).map_err(|error| failed(&error))?;
        let memory = NewRam::new(file, bytes).map_err(|error| failed(&error))?;
        // From here on the next command knows what to throw away.
        folder.set_record(&record)?;
        Ok(memory)
    };
    let memory = made().inspect_err(|_| {
        let _ = remove_folder(&images);
        let _ = folder.remove_all();
    })?;
    Ok((record, memory))
}

/// Restores a container up to the last step: its copies have arrived, and CRIU's images are in this archive. Returns
/// its first process.
///
/// # Errors
/// Where it cannot be restored.
pub(crate) fn load(
    folder: &GuestFolder,
    description: &Description,
    archive: &[u8],
) -> Result<ProcessId, Failure> {
    let images = images_folder(folder);
    let inside = images.join("images");
    let failed = |error: std::io::Error| {
        Failure::new(Code::Failed, format!("unpacking the state of the processes: {error}"))
    };
    fs::create_dir(&inside).map_err(failed)?;
    unpack(&inside, archive).map_err(failed)?;
    let index = fs::read(inside.join(STAGING_INDEX)).map_err(failed)?;
    let index: StagingIndex =
        serde_json::from_slice(&index).map_err(|error| failed(error.into()))?;
    index.unpack(&images)?;
    let container = description.container();
    let root_files = images.join(ROOT_FILES);
    if let Some(definition) = &description.definition {
        definition.put_together(&images, root_files.exists().then_some(&root_files))?;
        let _ = fs::remove_file(&root_files);
    } else if let Some(overlay) = description.overlay.as_ref().filter(|_| root_files.exists()) {
        let rootfs = container.rootfs(&description.config);
        RestoredRoot::mount_archive(&root_files, overlay, rootfs, folder)?.keep();
        fs::remove_file(&root_files).map_err(failed)?;
    }
    // In the host's own network, and in one that podman makes, there is no address that has come along.
    let connections = description.podman.is_none() && has_own_network(&description.config);
    let options = RestoreOptions { connections, ..options(folder) };
    Ok(HeldRestore::begin(&container, &options)?.process())
}

/// Lets a container run that was restored up to the last step. Returns its record then.
///
/// # Errors
/// Where it does not run.
pub(crate) fn run(folder: &GuestFolder, record: &GuestRecord) -> Result<GuestRecord, Failure> {
    let Some(known) = &record.container else { return Ok(record.clone()) };
    if record.phase == Phase::Running {
        return Ok(record.clone());
    }
    let container = Container::of(known);
    let options = options(folder);
    match HeldRestore::find(&container, &options) {
        Some(held) => held.run()?,
        // A command that was killed has said the word.
        None => finish(&container, &options, &record.process)?,
    }
    let container = Some(container.known_now()?.record());
    let record = GuestRecord { phase: Phase::Running, container, ..record.clone() };
    folder.set_record(&record)?;
    let _ = remove_folder(&options.folder);
    Ok(record)
}

/// Whether a container that arrived is there: kept before the last step, or behind it.
pub(crate) fn lives(folder: &GuestFolder, record: &GuestRecord) -> bool {
    if record.phase == Phase::Running {
        return record.process.is_alive();
    }
    let known = record.container.as_ref().map(Container::of);
    known.is_some_and(|container| dewar_guest_oci::lives(&container, &options(folder)))
}

/// Nothing is left of a container that arrived and does not stay.
///
/// # Errors
/// Where something cannot be removed.
pub(crate) fn throw_away(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    if let Some(known) = &record.container {
        if !discard(&Container::of(known), &options(folder)) {
            let what = format!("what was restored of '{}' does not end", folder.name());
            return Err(Failure::new(Code::Attention, what).advice("'dewar ps' tries again"));
        }
    }
    unmount_files(folder)?;
    let _ = remove_folder(&images_folder(folder));
    Ok(folder.remove_all()?)
}

fn options(folder: &GuestFolder) -> RestoreOptions {
    RestoreOptions { folder: images_folder(folder), strays: strays(folder), connections: true }
}
