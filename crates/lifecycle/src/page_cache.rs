//! A guest's files in the page cache: which of their pages it uses, and reading those before it does.

use crate::failure::{Code, Failure, GONE};
use crate::host::Host;
use crate::hot_pages::{HOT_PAGES, read};
use crate::process::connect;
use dewar_guest_oci::{Container, Overlay};
use dewar_guest_qemu::discover;
use dewar_kernel::{end_signals, threads_of};
use dewar_pagecache::{FileTree, Manifest, ReadWatch, cached, cached_hot};
use dewar_registry::{GuestFolder, GuestRecord};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use dewar_pagecache::{FileCached, Warmed, warm};

/// For so long another command that works on a guest is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where a guest's files are: those of a container's root file system and volumes, or a virtual machine's disks.
///
/// # Errors
/// Where the guest cannot be asked.
pub fn files_of(record: &GuestRecord) -> Result<Vec<FileTree>, Failure> {
    if let Some(known) = &record.container {
        let container = Container::of(known);
        let config = container.config()?;
        return files_of_container(&container, &config);
    }
    let mut qmp = connect(record)?;
    let found = discover(&mut qmp, record)?;
    let disk = |file: &str| {
        let path = record.folder.join(file);
        FileTree { host: path.clone(), inside: path }
    };
    // What is opened past the page cache is never in it.
    let disks = found.disks.iter().filter(|disk| !disk.direct);
    Ok(disks.map(|it| disk(&it.file)).collect())
}

/// Those of a container: what is mounted over others comes after them.
pub(crate) fn files_of_container(
    container: &Container,
    config: &Value,
) -> Result<Vec<FileTree>, Failure> {
    let rootfs = container.rootfs(config);
    let root = |host: PathBuf| FileTree { host, inside: "/".into() };
    let mut trees: Vec<FileTree> = match Overlay::mounted_on(&rootfs)? {
        // The page cache is that of the folders below.
        Some(overlay) => {
            let lower = overlay.lower.split(':').filter(|it| !it.is_empty()).rev();
            lower.map(PathBuf::from).chain([overlay.upper]).map(root).collect()
        }
        None => vec![root(rootfs)],
    };
    for mount in config["mounts"].as_array().into_iter().flatten() {
        let is_bind = mount["type"] == "bind"
            || mount["options"].as_array().is_some_and(|options| {
                options.iter().any(|option| option == "bind" || option == "rbind")
            });
        if let (true, Some(host), Some(inside)) =
            (is_bind, mount["source"].as_str(), mount["destination"].as_str())
        {
            // A path that does not begin with '/' is one in the bundle.
            let host = container.config_file().with_file_name("").join(host);
            trees.push(FileTree { host, inside: inside.into() });
        }
    }
    Ok(trees)
}

/// Watches what a guest reads for so long, and keeps which pages are hot.
///
/// # Errors
/// Where the guest has ended, or the kernel does not tell.
pub fn learn(host: &Host, name: &str, window: Duration) -> Result<Manifest, Failure> {
    let (folder, record) = running(host, name)?;
    let trees = files_of(&record)?;
    // Who ends it early learns what was seen until then, and nothing is left in the kernel.
    let end = end_signals().map_err(|error| Failure::new(Code::Failed, error.to_string()))?;
    let is_asked_to_end = || {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    };
    let mut watch = ReadWatch::start(&trees, &threads(&record)?)?;
    watch.run(window, || !record.process.is_alive() || is_asked_to_end())?;
    let manifest = watch.finish()?.manifest(&trees);
    if !record.process.is_alive() {
        return Err(Failure::new(Code::Failed, format!("'{name}' ended while it was watched")));
    }
    // One that did nothing meanwhile uses what it used before.
    if !manifest.files.is_empty() {
        // A checkpoint that is under way then is waited for.
        let _lock = folder.lock_within(PATIENCE)?;
        if !folder.record()?.process.is_same(&record.process) {
            let what = format!("'{name}' is another guest now than the one that was watched");
            return Err(Failure::new(Code::Failed, what));
        }
        folder.write(HOT_PAGES, &manifest)?;
    }
    Ok(manifest)
}

/// A guest that runs. It is not kept locked: to be watched or warmed changes nothing of it.
fn running(host: &Host, name: &str) -> Result<(GuestFolder, GuestRecord), Failure> {
    let held = host.lock(name)?;
    if !held.record.process.is_alive() {
        return Err(Failure::new(Code::Failed, format!("'{name}' has ended")).advice(GONE));
    }
    Ok((held.folder.clone(), held.record.clone()))
}

/// All threads of a guest.
fn threads(record: &GuestRecord) -> Result<Vec<i32>, Failure> {
    let processes = match &record.container {
        Some(known) => Container::of(known).pids()?,
        None => vec![record.process.pid],
    };
    // One that has ended meanwhile has none.
    Ok(processes.into_iter().flat_map(threads_of).map(|task| task.thread).collect())
}

/// What is known of a guest's hot pages, and where its files are; or what a file says of them.
///
/// # Errors
/// Where nothing is known.
pub fn known(
    host: &Host,
    name: &str,
    from: Option<&Path>,
) -> Result<(Manifest, Vec<FileTree>), Failure> {
    let (folder, record) = running(host, name)?;
    let trees = files_of(&record)?;
    let path = from.map_or_else(|| folder.file(HOT_PAGES), Path::to_owned);
    let manifest = match (read(&path)?, from) {
        (Some(manifest), _) => manifest,
        (None, None) => {
            let what = format!("it is not known which pages '{name}' uses");
            return Err(Failure::new(Code::NotFound, what)
                .advice(format!("'dewar warm {name} --learn' looks for 10 seconds")));
        }
        (None, Some(path)) => {
            return Err(Failure::new(Code::NotFound, format!("{} is missing", path.display())));
        }
    };
    Ok((manifest, trees))
}

/// What is cached of a guest's files, and what is known to be hot; of `all` files, or where it is known of those that it uses.
///
/// # Errors
/// Where the guest cannot be asked.
pub fn report(
    host: &Host,
    name: &str,
    all: bool,
) -> Result<(Option<Manifest>, Vec<FileCached>), Failure> {
    let (folder, record) = running(host, name)?;
    let trees = files_of(&record)?;
    let manifest = read(&folder.file(HOT_PAGES))?;
    let files = match &manifest {
        Some(manifest) if !all => cached_hot(&trees, manifest),
        manifest => cached(&trees, manifest.as_ref()),
    };
    Ok((manifest, files))
}
