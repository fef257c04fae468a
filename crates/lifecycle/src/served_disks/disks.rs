//! Which disks of a guest are served, and that they are.

use crate::failure::{Code, Failure};
use crate::helper::Helper;
use dewar_guest_qemu::cmdline::{RESET_MONITOR_FILE, ServedNode, with_served_disks};
use dewar_guest_qemu::reset::settle;
use dewar_registry::{GuestFolder, GuestRecord, ProcessId, RegistryError};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Which disks are served.
pub(crate) const FILE: &str = "served-disks.json";
/// The supervisor.
pub(super) const SUPERVISOR: &str = "disk-supervisor.json";
/// The server's socket.
pub(super) const SOCKET: &str = "disks.sock";
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

    /// Whether any is to stay warm.
    pub fn is_any_warm(&self) -> bool {
        self.disks.iter().any(|disk| disk.is_warm)
    }

    /// A guest's command line with these.
    ///
    /// # Errors
    /// Where a device of the line cannot be understood.
    pub fn on(&self, line: &[String], folder: &GuestFolder) -> Result<Vec<String>, Failure> {
        let node = |disk: &ServedDisk| ServedNode {
            id: disk.id.clone(),
            format: disk.format.clone(),
            is_read_only: disk.is_read_only,
        };
        let nodes: Vec<ServedNode> = self.disks.iter().map(node).collect();
        let (socket, monitor) = (folder.file(SOCKET), folder.file(RESET_MONITOR_FILE));
        with_served_disks(line, &nodes, &socket, &monitor)
            .map_err(|why| Failure::new(Code::Unsupported, format!("this command line: {why}")))
    }

    /// Notes them, and has them served from here on: to a QEMU that is to be started under the guest's lock.
    ///
    /// # Errors
    /// Where a disk cannot be opened or is in use, or the processes do not start.
    pub fn serve(&self, folder: &GuestFolder) -> Result<(), Failure> {
        folder.write(FILE, self)?;
        start_supervisor(folder).inspect_err(|_| {
            let _ = folder.remove(FILE);
        })
    }
}

/// That no disk of the folder's guest is served any more: the next one is another guest.
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

/// Starts the processes again for a guest whose disks nobody serves. Nothing where it has no such disks.
///
/// # Errors
/// Where they do not start.
pub fn recover(folder: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    if record.process.is_alive() && ServedDisks::of(folder)?.is_some() {
        let settled = settle(&record);
        settled.map_err(|error| Failure::new(Code::Attention, format!("its memory: {error}")))?;
        serve_again(folder)?;
    }
    Ok(record)
}

/// The same for a guest that has no process yet and is about to get one.
pub(crate) fn serve_again(folder: &GuestFolder) -> Result<(), Failure> {
    if ServedDisks::of(folder)?.is_some() && supervisor_of(folder).is_none() {
        start_supervisor(folder)?;
    }
    Ok(())
}

/// Why a guest with such disks cannot do something, if it has any.
pub(crate) fn refuse(folder: &GuestFolder, what: &str) -> Result<(), Failure> {
    match ServedDisks::of(folder)? {
        None => Ok(()),
        Some(_) => Err(Failure::new(
            Code::Unsupported,
            format!("a guest whose disks Dewar serves ('run --disk') cannot {what} yet"),
        )
        .state("the guest runs on")
        .advice("start it with the disks on its own command line")),
    }
}

fn supervisor_of(folder: &GuestFolder) -> Option<ProcessId> {
    folder.read::<ProcessId>(SUPERVISOR).ok().flatten().filter(ProcessId::is_alive)
}

fn start_supervisor(folder: &GuestFolder) -> Result<(), Failure> {
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
