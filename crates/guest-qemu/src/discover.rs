//! What a running QEMU is made of, by QMP and `/proc`, and whether Dewar can
//! handle it. Nothing is changed.

use crate::cmdline::{file_of, served_nodes};
use crate::qemu_user::closed_disk;
use crate::qmp::{Qmp, QmpError};
use dewar_guest::{DiskInfo, GuestError};
use dewar_kernel::{Pid, huge_page_bytes, list_fds};
use dewar_memory::Ram;
use dewar_registry::{GuestRecord, RamFile};
use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process};
use serde_json::{Value, json};
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

/// The size of huge pages that is handled.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
const LOOKING_OVER: &str = "looking over";

/// A writable disk of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// What the guest crate tells of it.
    pub info: DiskInfo,
    /// The block node of its format: the device is attached to it, or to filters (throttle,
    /// copy-on-read) above it.
    pub node: String,
    /// The block node that the device is attached to.
    pub top: String,
    /// Its image format.
    pub format: String,
    /// Its file, as QEMU names it.
    pub file: String,
    /// Whether it is opened past the host's page cache.
    pub direct: bool,
    /// Whether a process of ours serves it: then that has its file open, not QEMU.
    pub is_served: bool,
}

/// A guest that can be handled.
#[derive(Debug)]
pub struct Discovered {
    /// Its RAM, mapped.
    pub ram: Arc<Ram>,
    /// Its writable disks.
    pub disks: Vec<Disk>,
    /// QEMU's version, such as `7.2.22`.
    pub version: String,
    /// The machine type with its version, such as `pc-q35-7.2`.
    pub machine: String,
}

/// QEMU's version, such as `7.2.22`.
pub(crate) fn version(qmp: &mut Qmp) -> Result<String, QmpError> {
    let report = qmp.execute("query-version", json!({}))?;
    let part = |name: &str| report["qemu"][name].as_u64().unwrap_or(0);
    Ok(format!("{}.{}.{}", part("major"), part("minor"), part("micro")))
}

/// Looks a guest over.
///
/// # Errors
/// [`GuestError::Unsupported`] with every reason why it cannot be handled.
pub fn discover(qmp: &mut Qmp, record: &GuestRecord) -> Result<Discovered, GuestError> {
    let name = &record.name;
    let failed = |error| GuestError::failed(LOOKING_OVER, name, error);
    let version = version(qmp).map_err(failed)?;
    let mut ask = |command: &str, arguments: Value| qmp.execute(command, arguments).map_err(failed);
    let backends = ask("query-memdev", json!({}))?;
    let memory_devices = ask("query-memory-devices", json!({}))?;
    let migration = ask("query-migrate", json!({}))?;
    let blocks = ask("query-block", json!({}))?;
    let machine = ask("qom-get", json!({"path": "/machine", "property": "type"}))?;
    let peripherals = [
        ask("qom-list", json!({"path": "/machine/peripheral"}))?,
        ask("qom-list", json!({"path": "/machine/peripheral-anon"}))?,
    ];

    let mut reasons = Vec::new();
    if memory_devices.as_array().is_some_and(|devices| !devices.is_empty()) {
        reasons
            .push("it has memory devices (hot-plugged or not), which are not handled".to_owned());
    }
    for reason in migration["blocked-reasons"].as_array().into_iter().flatten() {
        reasons.push(format!("QEMU cannot save its state: {}", reason.as_str().unwrap_or("?")));
    }
    reasons.extend(foreign_writers(record, &peripherals));
    let nodes = match has_filters(&blocks) {
        true => ask("query-named-block-nodes", json!({"flat": true}))?,
        false => Value::Null,
    };
    let mut disks = writable_disks(&blocks, &nodes, &mut reasons);
    if crate::namespaces::is_same_namespace(record.process.pid, "mnt") {
        let files: Vec<_> = disks.iter().map(|disk| record.folder.join(&disk.file)).collect();
        reasons.extend(closed_disk(record.process.pid, &files));
    }
    name_served(&mut disks, &record.arguments);
    let ram = map_ram(&mut ask, &backends, record, &mut reasons)?;
    reasons.extend(balloon_on_dax(&ram, &peripherals));
    if !reasons.is_empty() {
        return Err(GuestError::Unsupported { guest: name.clone(), reasons });
    }
    Ok(Discovered {
        ram: Arc::new(ram),
        disks,
        version,
        machine: machine.as_str().unwrap_or("").trim_end_matches("-machine").to_owned(),
    })
}

/// A device that gives pages of RAM back, where the kernel cannot track a page that is not there: on DAX a write
/// to such a page would wait for ever.
fn balloon_on_dax(ram: &Ram, peripherals: &[Value; 2]) -> Option<String> {
    let mut devices = peripherals.iter().flat_map(|list| list.as_array().into_iter().flatten());
    let has_balloon =
        devices.any(|it| it["type"].as_str().is_some_and(|kind| kind.contains("virtio-balloon")));
    let is_on_dax = ram.regions().iter().any(|region| region.is_dax);
    (has_balloon && is_on_dax).then(|| {
        "it has a balloon, and its RAM lies on persistent memory (DAX), where a page that is given \
         back cannot be tracked"
            .to_owned()
    })
}

/// A process or device that writes RAM past the guest's process or its page tables.
fn foreign_writers(record: &GuestRecord, peripherals: &[Value; 2]) -> Vec<String> {
    let mut reasons = Vec::new();
    let files = list_fds(Pid(record.process.pid)).unwrap_or_default();
    if files.iter().any(|file| file.target.starts_with("/dev/vfio/")) {
        reasons.push("it uses VFIO: a device's own writes to RAM are not seen".to_owned());
    }
    if files.iter().any(|file| file.target.to_string_lossy().starts_with("/dev/vhost-vdpa")) {
        reasons.push("it uses vhost-vdpa: a device's own writes to RAM are not seen".to_owned());
    }
    let has = |kind: &str| {
        let devices = peripherals.iter().flat_map(|list| list.as_array().into_iter().flatten());
        devices.filter_map(|device| device["type"].as_str()).any(|it| it.contains(kind))
    };
    if has("ivshmem-") {
        reasons.push("it uses ivshmem: other processes write its memory".to_owned());
    }
    if has("vhost-user") || record.arguments.iter().any(|argument| argument.contains("vhost-user"))
    {
        reasons.push("it uses vhost-user: another process writes its RAM".to_owned());
    }
    reasons
}

/// Filters that leave a disk's content as it is.
const FILTERS: [&str; 2] = ["throttle", "copy-on-read"];

fn has_filters(blocks: &Value) -> bool {
    let mut drivers = blocks.as_array().into_iter().flatten().map(|it| &it["inserted"]["drv"]);
    drivers.any(|it| it.as_str().is_some_and(|it| FILTERS.contains(&it)))
}

/// The node of the format below the filters of a disk: the one that has its file, and is not
/// that file's own.
fn below_filters<'n>(inserted: &Value, nodes: &'n Value) -> Option<&'n Value> {
    let file = file_of(inserted["file"].as_str()?)?;
    let mut found = nodes.as_array()?.iter().filter(|node| {
        let driver = node["drv"].as_str().unwrap_or_default();
        HANDLED.contains(&driver) && node["file"].as_str().and_then(file_of).as_ref() == Some(&file)
    });
    let first = found.next();
    first.filter(|_| found.next().is_none())
}

/// Formats of disks.
const HANDLED: [&str; 2] = ["qcow2", "raw"];

/// The files and format nodes of the disks that a QEMU may write.
pub(crate) fn writable_nodes(qmp: &mut Qmp) -> Result<Vec<(String, String)>, QmpError> {
    let blocks = qmp.execute("query-block", json!({}))?;
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}))?;
    let disks = writable_disks(&blocks, &nodes, &mut Vec::new());
    Ok(disks.into_iter().map(|disk| (disk.file, disk.node)).collect())
}

fn writable_disks(blocks: &Value, nodes: &Value, reasons: &mut Vec<String>) -> Vec<Disk> {
    let mut disks = Vec::new();
    for block in blocks.as_array().into_iter().flatten() {
        let inserted = &block["inserted"];
        if inserted.is_null() || inserted["ro"].as_bool() != Some(false) {
            continue;
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let device = text(&block["device"]);
        let top = text(&inserted["node-name"]);
        let is_filter = inserted["drv"].as_str().is_some_and(|it| FILTERS.contains(&it));
        let inserted = match is_filter {
            true => below_filters(inserted, nodes).unwrap_or(inserted),
            false => inserted,
        };
        let node = text(&inserted["node-name"]);
        let format = text(&inserted["drv"]);
        let name = if device.is_empty() { top.clone() } else { device };
        if !HANDLED.contains(&format.as_str()) {
            reasons
                .push(format!("disk '{name}' is of format '{format}'; qcow2 and raw are handled"));
        }
        disks.push(Disk {
            info: DiskInfo {
                name,
                virtual_bytes: inserted["image"]["virtual-size"].as_u64().unwrap_or(0),
            },
            node,
            top,
            format,
            file: text(&inserted["file"]),
            direct: inserted["cache"]["direct"].as_bool() == Some(true),
            is_served: false,
        });
    }
    disks
}

/// Gives disks that are served the names of their files: QEMU knows only their server.
fn name_served(disks: &mut [Disk], line: &[String]) {
    let served = served_nodes(line);
    for disk in disks {
        if let Some(node) = served.iter().find(|it| it.id == disk.node) {
            disk.file = node.path.display().to_string();
            disk.is_served = true;
        }
    }
}

/// Maps every RAM backend, in the order in which QEMU tells of them, by id.
fn map_ram(
    ask: &mut impl FnMut(&str, Value) -> Result<Value, GuestError>,
    backends: &Value,
    record: &GuestRecord,
    reasons: &mut Vec<String>,
) -> Result<Ram, GuestError> {
    let mut ram = Ram::default();
    let mut backends: Vec<&Value> = backends.as_array().into_iter().flatten().collect();
    backends.sort_by_key(|backend| backend["id"].as_str().unwrap_or_default());
    if backends.is_empty() {
        reasons.push("its RAM is not in a memory backend".to_owned());
    }
    for backend in backends {
        let id = backend["id"].as_str().unwrap_or_default();
        let bytes = backend["size"].as_u64().unwrap_or(0);
        let property = json!({"path": format!("/objects/{id}"), "property": "mem-path"});
        let path = ask("qom-get", property).ok();
        let Some(path) = path.as_ref().and_then(Value::as_str) else {
            reasons.push(format!(
                "RAM backend '{id}' is not a file: start QEMU with -object memory-backend-file,\
                 id={id},size={bytes},mem-path=/dev/shm/FILE,share=on -machine memory-backend={id}"
            ));
            continue;
        };
        if backend["share"].as_bool() != Some(true) {
            reasons
                .push(format!("RAM backend '{id}' lacks share=on: its writes go to private pages"));
            continue;
        }
        match mapping_of(record.process.pid, id, &record.folder.join(path), bytes) {
            Ok((file, address)) => ram.add(id.to_owned(), file, bytes, address)?,
            Err(reason) => reasons.push(format!("RAM backend '{id}': {reason}")),
        }
    }
    Ok(ram)
}

/// Maps the RAM of a guest whose files need not be known, as far as it can be.
///
/// # Errors
/// Where QEMU does not answer.
pub fn map_backends(qmp: &mut Qmp, record: &GuestRecord) -> Result<Ram, GuestError> {
    let mut ask = |command: &str, arguments: Value| {
        qmp.execute(command, arguments)
            .map_err(|error| GuestError::failed(LOOKING_OVER, &record.name, error))
    };
    let backends = ask("query-memdev", json!({}))?;
    map_ram(&mut ask, &backends, record, &mut Vec::new())
}

/// Maps the RAM of a guest whose files are known.
///
/// # Errors
/// Where its process does not map them as it should.
pub fn map_ram_files(guest: &str, pid: i32, files: &[RamFile]) -> Result<Ram, GuestError> {
    let mut ram = Ram::default();
    for RamFile { id, path, bytes } in files {
        let (file, address) = mapping_of(pid, id, path, *bytes).map_err(|reason| {
            GuestError::failed("mapping the RAM", guest, format!("'{id}': {reason}"))
        })?;
        ram.add(id.clone(), file, *bytes, address)?;
    }
    Ok(ram)
}

/// Finds where the process maps the backend's file, and opens that very file.
fn mapping_of(pid: i32, id: &str, path: &Path, bytes: u64) -> Result<(File, u64), String> {
    let maps = Process::new(pid)
        .and_then(|process| process.maps())
        .map_err(|error| format!("/proc/{pid}/maps cannot be read: {error}"))?;
    let mine: Vec<&MemoryMap> =
        maps.iter().filter(|map| is_shared(map) && is_file_of(map, id, path)).collect();
    // A region may be split into several mappings of one run.
    let first = mine.first().ok_or("QEMU does not map it shared")?;
    let mut end = first.address.0;
    for map in &mine {
        if map.address.0 != end || map.inode != first.inode {
            return Err("it is mapped more than once, or another backend uses its file".to_owned());
        }
        end = map.address.1;
    }
    if end - first.address.0 != bytes || first.offset != 0 {
        return Err("it is not mapped as a whole".to_owned());
    }
    // By its mapping, so that it is the right file whatever its path means now.
    let (start, stop) = first.address;
    let opened = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/map_files/{start:x}-{stop:x}"))
        .map_err(|error| format!("its file cannot be opened: {error}"))?;
    if opened.metadata().is_ok_and(|data| data.file_type().is_char_device()) {
        return Err("it is a device, of which no file can be made again".to_owned());
    }
    let huge = huge_page_bytes(&opened).map_err(|error| error.to_string())?;
    if huge.is_some_and(|bytes| bytes != HUGE_PAGE_BYTES) {
        return Err("it is made of huge pages of another size than 2 MiB".to_owned());
    }
    Ok((opened, first.address.0))
}

/// Whether a process maps the file that `path` means now, shared.
pub fn maps_file(pid: i32, path: &Path) -> bool {
    let Ok(file) = std::fs::metadata(path) else { return false };
    let maps = Process::new(pid).and_then(|process| process.maps());
    maps.into_iter().flatten().any(|map| is_shared(&map) && is_mapping_of(&map, &file))
}

fn is_mapping_of(map: &MemoryMap, file: &Metadata) -> bool {
    let device = (rustix::fs::major(file.dev()) as i32, rustix::fs::minor(file.dev()) as i32);
    map.inode == file.ino() && map.dev == device
}

fn is_shared(map: &MemoryMap) -> bool {
    map.perms.contains(MMPermissions::SHARED | MMPermissions::WRITE)
}

/// Whether a mapping is of the backend's file: the path itself, or the
/// nameless file that QEMU makes where the path is a folder.
fn is_file_of(map: &MemoryMap, id: &str, path: &Path) -> bool {
    let MMapPath::Path(mapped) = &map.pathname else { return false };
    let text = mapped.to_string_lossy();
    let mapped = Path::new(text.trim_end_matches(" (deleted)"));
    if mapped == path || std::fs::canonicalize(path).is_ok_and(|path| mapped == path) {
        return true;
    }
    // A file without a name, to which the path is a link.
    if std::fs::metadata(path).is_ok_and(|file| is_mapping_of(map, &file)) {
        return true;
    }
    let made_by_qemu = |name: &str| name.starts_with(&format!("qemu_back_mem.{id}."));
    mapped.parent() == Some(path)
        && mapped.file_name().and_then(|name| name.to_str()).is_some_and(made_by_qemu)
}
