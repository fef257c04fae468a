//! What is known of a guest between commands.

use crate::frozen::Frozen;
use crate::process::ProcessId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// By an option's value, as the user wrote it: the numbers of its descriptors in the present
/// process, joined by colons. A process that took a guest over has them under other numbers than
/// the one that was given them.
pub type Descriptors = BTreeMap<String, String>;

/// How far a guest has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its state is being loaded; it has not run yet.
    Restoring,
    /// It was started.
    Running,
    /// It has no process: its memory lies where it was, its state beside it.
    Frozen,
    /// It is about to be stopped, or stands still, to go on at another host. Whose it is the
    /// migration's record says ([`crate::Migrations`]).
    Leaving,
    /// It comes from another host, whose it still is.
    Arriving,
}

/// Where a restored guest came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The store, by its URL.
    pub store: String,
    /// The image.
    pub image: String,
    /// The files that its disks stand on.
    pub disks: Vec<PathBuf>,
    /// Whether those files are the store's own.
    #[serde(default = "yes")]
    pub in_store: bool,
}

impl Origin {
    /// Whether the guest's disks need the image.
    pub fn disks_in_store(&self) -> bool {
        self.in_store && !self.disks.is_empty()
    }
}

fn yes() -> bool {
    true
}

/// A file of a guest's RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamFile {
    /// The id of its backend.
    pub id: String,
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
}

/// The container that a guest is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// The runtime's program.
    pub runtime: PathBuf,
    /// The runtime's `--root`, where that is not its usual one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<PathBuf>,
    /// The id that the runtime knows it by.
    pub id: String,
    /// The folder with its `config.json`.
    pub bundle: PathBuf,
    /// The engine that has the runtime run it, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
}

/// A container engine: podman.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    /// Its program.
    pub program: PathBuf,
    /// Its `--root`, where that is not its usual one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<PathBuf>,
}

/// What is known of a guest between commands. Where it is a container, what is said of a QEMU is empty.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GuestRecord {
    /// Its name.
    pub name: String,
    /// QEMU, or the first process of a container.
    pub process: ProcessId,
    /// The container that it is; without it, it is a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<ContainerRecord>,
    /// The QEMU program.
    pub program: PathBuf,
    /// The user's own arguments.
    pub arguments: Vec<String>,
    /// The folder in which QEMU was started.
    pub folder: PathBuf,
    /// The QMP socket that Dewar uses.
    pub qmp: PathBuf,
    /// Whether somebody else started it.
    pub adopted: bool,
    /// Its RAM, in the order of its pages.
    pub ram: Vec<RamFile>,
    /// RAM files to remove when its process has ended.
    pub owned_ram: Vec<PathBuf>,
    /// Descriptors that its options have in this process; see [`Descriptors`].
    #[serde(default)]
    pub descriptors: Descriptors,
    /// How far it has come.
    pub phase: Phase,
    /// Whether it was restored or thawed and is still to be let run.
    #[serde(default)]
    pub start_pending: bool,
    /// The checkpoint that it was restored from.
    pub origin: Option<Origin>,
    /// Where it is while it is frozen, and until it is known to run again.
    #[serde(default)]
    pub frozen: Option<Frozen>,
    /// The page server of a guest that was restored lazily; `server.json` tells
    /// how far it is.
    pub server: Option<ProcessId>,
    /// The migration that brings it here, or takes it away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<u64>,
    /// What the last hand-over could not bring along, a sentence each: the process that finished it
    /// may have had nobody to tell.
    #[serde(default)]
    pub not_handed_over: Vec<String>,
}

impl GuestRecord {
    /// A guest that was just started by this command line in this folder, and runs.
    pub fn new(
        name: &str,
        process: ProcessId,
        (program, arguments): (PathBuf, Vec<String>),
        folder: PathBuf,
        qmp: PathBuf,
    ) -> Self {
        Self {
            name: name.to_owned(),
            process,
            container: None,
            program,
            arguments,
            folder,
            qmp,
            adopted: false,
            ram: Vec::new(),
            owned_ram: Vec::new(),
            descriptors: Descriptors::new(),
            phase: Phase::Running,
            start_pending: false,
            origin: None,
            frozen: None,
            server: None,
            migration: None,
            not_handed_over: Vec::new(),
        }
    }

    /// A container that was not started by us, and runs.
    pub fn new_container(name: &str, process: ProcessId, container: ContainerRecord) -> Self {
        let (program, folder) = (container.runtime.clone(), container.bundle.clone());
        let record = Self::new(name, process, (program, Vec::new()), folder, PathBuf::new());
        Self { adopted: true, container: Some(container), ..record }
    }
}
