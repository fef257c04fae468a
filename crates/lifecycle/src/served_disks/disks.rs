//! Which disks of a guest are served, and that they are.

use crate::failure::{Code, Failure};
use crate::helper::Helper;
use dewar_guest_qemu::cmdline::{
    DISKS_SOCKET_FILE, RESET_MONITOR_FILE, ServedNode, served_nodes, with_served_disks,
};
use dewar_guest_qemu::handover::is_under_way as is_handed_over;
use dewar_guest_qemu::reset::settle;
use dewar_registry::{GuestFolder, GuestRecord, ProcessId, RegistryError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Which disks are served.
pub(crate) const FILE: &str = "served-disks.json";
/// The supervisor.
pub(super) const SUPERVISOR: &str = "disk-supervisor.json";
/// The same, in what an image says of a machine.
const DESCRIBED: &str = "served_disks";
/// How long the supervisor and the server may take to open the disks.
pub(super) const READY_WITHIN: Duration = Duration::from_secs(30);

/// A disk that is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedDisk {
    /// The block node that a device of the guest's names.
    pub id: String,
    /// The file, or block device.
    pub path: PathBuf,
    /// Its format: `raw` or `qcow2`.
    pub format: String,
    /// Whether the guest may not write it.
    pub is_read_only: bool,
    /// Whether what is known of it outlives a reboot.
    pub is_warm: bool,
    /// Most bytes that are kept then, together with those of the other warm disks; nothing where that is as much as the guest
    /// has memory.
    pub cache_bytes: Option<u64>,
}

/// The disks of a guest that are served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedDisks {
    /// The disks.
    pub disks: Vec<ServedDisk>,
    /// How much memory the guest has: no more blocks are remembered than fit into it.
    pub memory_bytes: u64,
}

impl ServedDisks {
    /// Those of a guest; nothing where it has none.
    ///
    /// # Errors
    /// Where that cannot be read.
    pub fn of(folder: &GuestFolder) -> Result<Option<Self>, RegistryError> {
        folder.read(FILE)
    }

    /// Those of a command line, each as `said` says of its id, or with no cache.
    fn of_line(line: &[String], said: &[ServedDisk], memory_bytes: u64) -> Self {
        let disk = |node: ServedNode| {
            let said = said.iter().find(|it| it.id == node.id);
            ServedDisk {
                is_warm: said.is_some_and(|it| it.is_warm),
                cache_bytes: said.and_then(|it| it.cache_bytes),
                id: node.id,
                path: node.path,
                format: node.format,
                is_read_only: node.is_read_only,
            }
        };
        Self { disks: served_nodes(line).into_iter().map(disk).collect(), memory_bytes }
    }

    /// Whether any is to stay warm.
    pub fn is_any_warm(&self) -> bool {
        self.disks.iter().any(|disk| disk.is_warm)
    }
}

/// A guest's command line with these.
///
/// # Errors
/// Where a device of the line cannot be understood.
pub(crate) fn on_line(
    disks: &[ServedDisk],
    line: &[String],
    folder: &GuestFolder,
) -> Result<Vec<String>, Failure> {
    let node = |disk: &ServedDisk| ServedNode {
        id: disk.id.clone(),
        path: disk.path.clone(),
        format: disk.format.clone(),
        is_read_only: disk.is_read_only,
    };
    let nodes: Vec<ServedNode> = disks.iter().map(node).collect();
    with_served_disks(line, &nodes, &folder.file(RESET_MONITOR_FILE))
        .map_err(|why| Failure::new(Code::Unsupported, format!("this command line: {why}")))
}

/// Has the disks of a command line served, each as `said` says of its id: to a QEMU that is to be started under the guest's
/// lock. Nothing where the line has none.
///
/// # Errors
/// Where a disk cannot be opened or is in use, or the processes do not start.
pub(crate) fn serve_line(
    folder: &GuestFolder,
    line: &[String],
    said: &[ServedDisk],
    memory_bytes: u64,
) -> Result<(), Failure> {
    let before = ServedDisks::of(folder)?;
    // Those of a guest before it are others, also where they are the same files.
    forget(folder)?;
    let served = ServedDisks::of_line(line, said, memory_bytes);
    if served.disks.is_empty() {
        return Ok(());
    }
    folder.write(FILE, &served)?;
    start_supervisor(folder).inspect_err(|_| {
        // A guest that is frozen still keeps what was said of its disks.
        let _ = match before {
            Some(before) => folder.write(FILE, &before),
            None => folder.remove(FILE),
        };
    })
}

/// The same for a guest that has no process, and is about to get one.
///
/// # Errors
/// As [`serve_line`].
pub(crate) fn serve_record(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    let said = said_of(folder)?;
    let memory_bytes = record.ram.iter().map(|ram| ram.bytes).sum();
    serve_line(folder, &record.arguments, &said, memory_bytes)
}

/// Notes what is said of each disk in what an image says of a machine. Their files are on its command line.
///
/// # Errors
/// Where it cannot be read.
pub(crate) fn describe(folder: &GuestFolder, machine: &mut Value) -> Result<(), Failure> {
    if let Some(served) = ServedDisks::of(folder)? {
        machine[DESCRIBED] = json!(served.disks);
    }
    Ok(())
}

/// What [`describe`] noted.
pub(crate) fn described(machine: &Value) -> Vec<ServedDisk> {
    serde_json::from_value(machine[DESCRIBED].clone()).unwrap_or_default()
}

/// What is said of each disk of a guest.
///
/// # Errors
/// Where that cannot be read.
pub(crate) fn said_of(folder: &GuestFolder) -> Result<Vec<ServedDisk>, RegistryError> {
    Ok(ServedDisks::of(folder)?.map(|it| it.disks).unwrap_or_default())
}

/// That no disk of the folder's guest is served any more: the next one is another guest.
///
/// # Errors
/// Where that cannot be noted.
pub(crate) fn forget(folder: &GuestFolder) -> Result<(), Failure> {
    if ServedDisks::of(folder)?.is_none() {
        return Ok(());
    }
    folder.remove(FILE)?;
    if let Some(supervisor) = supervisor_of(folder) {
        // It sees that there is nothing to serve, and that nobody needs it.
        let _ = supervisor.ends_within(READY_WITHIN);
    }
    Ok(())
}

/// Starts the processes again for a guest whose disks nobody serves; of one that has ended, waits until they have ended, too,
/// and its disks are free. Nothing where it has no such disks.
///
/// # Errors
/// Where they do not start.
pub fn recover(folder: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    if ServedDisks::of(folder)?.is_none() {
        return Ok(record);
    }
    if record.process.is_alive() || is_handed_over(folder) {
        let settled = settle(&record);
        settled.map_err(|error| Failure::new(Code::Attention, format!("its memory: {error}")))?;
        if supervisor_of(folder).is_none() {
            start_supervisor(folder)?;
        }
    } else if let Some(supervisor) = supervisor_of(folder) {
        let _ = supervisor.ends_within(READY_WITHIN / 6);
    }
    Ok(record)
}

/// Whether a guest has such disks.
///
/// # Errors
/// Where that cannot be read.
pub(crate) fn has_some(folder: &GuestFolder) -> Result<bool, RegistryError> {
    Ok(ServedDisks::of(folder)?.is_some())
}

/// Has the locks on a guest's served disks given up, so that another host can have them. A guest that stays takes them again.
///
/// # Errors
/// Where their server does not answer.
pub(crate) fn release_locks(folder: &GuestFolder) -> Result<(), Failure> {
    if !has_some(folder)? {
        return Ok(());
    }
    dewar_blockcache::release_locks(&folder.file(DISKS_SOCKET_FILE))
        .map_err(|error| Failure::new(Code::Failed, format!("the server of its disks: {error}")))
}

pub(super) fn supervisor_of(folder: &GuestFolder) -> Option<ProcessId> {
    folder.read::<ProcessId>(SUPERVISOR).ok().flatten().filter(ProcessId::is_alive)
}

pub(super) fn start_supervisor(folder: &GuestFolder) -> Result<(), Failure> {
    let mut helper = start(folder.root(), "__disks", folder.name())?;
    let ready = helper.wait_ready(Some(READY_WITHIN));
    let own = helper.process().id() as i32;
    if ready.is_err() && supervisor_of(folder).is_some_and(|other| other.pid != own) {
        // The server had started one already.
        return Ok(());
    }
    ready.map_err(|why| {
        Failure::new(
            Code::Failed,
            format!("the disks of '{}' are not served: {why}", folder.name()),
        )
    })
}

pub(super) fn start(root: &Path, verb: &str, name: &str) -> Result<Helper, Failure> {
    Helper::start(root, verb, [name]).map_err(|error| {
        Failure::new(
            Code::Failed,
            format!("the process for the disks of '{name}' did not start: {error}"),
        )
    })
}
