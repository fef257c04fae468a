//! A container that is restored up to its last step: a relay ([`crate::relay`]) holds the message back that
//! lets it run.

use crate::container::Container;
use crate::dump::failure;
use crate::error::OciError;
use crate::folder::{held_process, held_socket, prepared_network, unwanted};
use crate::network::{self, Network, Openings};
use crate::podman::Podman;
use crate::relay::{GO, put_before_criu};
use crate::restore::{RestoreOptions, restored_process, runtime_command, started};
use crate::runtime::{Status, find_program};
use dewar_kernel::{Pid, ProcessHandle, detach};
use dewar_registry::ProcessId;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

/// How long CRIU may take to come to the last step, and to end what it has restored.
const HELD_WITHIN: Duration = Duration::from_secs(300);
/// How long the last step may take.
const RUNS_WITHIN: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(5);

/// A container that is all there and does not run.
///
/// Dropped, it stays so, and can be found again in its folder.
#[derive(Debug)]
pub struct HeldRestore {
    container: Container,
    options: RestoreOptions,
    /// The container's first process.
    process: ProcessId,
}

impl HeldRestore {
    /// Restores a container, which the runtime must not know, up to the last step.
    ///
    /// # Errors
    /// Where it cannot be restored; there is no container then.
    pub fn begin(container: &Container, options: &RestoreOptions) -> Result<Self, OciError> {
        let folder = &options.folder;
        if let Some(network) = own_network(container)? {
            let path = prepared_network(folder);
            let openings = network.openings()?;
            let text = serde_json::to_vec(&openings).map_err(io::Error::from);
            text.and_then(|text| fs::write(&path, text)).map_err(OciError::io("write", &path))?;
            network.prepare(&openings)?;
        }
        let mut runtime = runtime_command(container, options)?;
        let criu = find_program(Path::new("criu")).ok_or_else(|| OciError::NoRuntime {
            program: "criu".into(),
            cause: io::ErrorKind::NotFound.into(),
        })?;
        put_before_criu(&mut runtime, &criu, folder).map_err(OciError::io("prepare", folder))?;
        let mut command = started(container, runtime, options)?;
        let mut runtime = detach(&mut command).spawn().map_err(|cause| OciError::NoRuntime {
            program: container.runtime.program.clone(),
            cause,
        })?;
        let deadline = Instant::now() + HELD_WITHIN;
        loop {
            if let Some(held) = Self::find(container, options) {
                reap(runtime);
                return Ok(held);
            }
            if !matches!(runtime.try_wait(), Ok(None)) || Instant::now() > deadline {
                let error = failure(container, folder, "restore.log", "restoring");
                discard(container, options);
                let _ = runtime.wait();
                return Err(error);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The one that waits in a folder.
    pub fn find(container: &Container, options: &RestoreOptions) -> Option<Self> {
        if !waits(container, options) {
            return None;
        }
        let process = first_process(&options.folder)?;
        Some(Self { container: container.clone(), options: options.clone(), process })
    }

    /// The container's first process.
    pub fn process(&self) -> ProcessId {
        self.process
    }

    /// Lets it run.
    ///
    /// # Errors
    /// Where it does not come to run.
    pub fn run(self) -> Result<(), OciError> {
        let folder = &self.options.folder;
        let named = own_network(&self.container)?;
        if let Some(network) = &named {
            // CRIU's own rules keep packets out until the connections are as they were.
            network.take_over()?;
        }
        let say = || -> io::Result<()> {
            let mut socket = UnixStream::connect(held_socket(folder))?;
            socket.write_all(GO)?;
            socket.set_read_timeout(Some(RUNS_WITHIN))?;
            // The relay ends when CRIU does.
            let _ = socket.read(&mut [0]);
            Ok(())
        };
        say().map_err(OciError::io("let run what waits in", folder))?;
        wait_until_done(&self.container, &self.options, &self.process)?;
        open(&self.container, &self.process, named.is_some())
    }
}

/// Whether a container that was restored in this folder is there: it waits for the word, or has heard it and runs.
pub fn lives(container: &Container, options: &RestoreOptions) -> bool {
    let Some(process) = first_process(&options.folder).filter(ProcessId::is_alive) else {
        return false;
    };
    waits(container, options) || runs(container, &process)
}

/// Whether a container waits for the word, and all who must be there when it hears it: podman gives up after four
/// minutes (its `ContainerCreateTimeout`), and takes down the network and the files.
fn waits(container: &Container, options: &RestoreOptions) -> bool {
    let has_podman = container.podman.is_none() || Podman::is_restoring(&options.folder);
    has_podman && UnixStream::connect(held_socket(&options.folder)).is_ok()
}

/// Finishes what is left to do for a container that has heard the word.
///
/// # Errors
/// Where it does not run.
pub fn finish(
    container: &Container,
    options: &RestoreOptions,
    process: &ProcessId,
) -> Result<(), OciError> {
    wait_until_done(container, options, process)?;
    open(container, process, false)
}

/// Waits for the runtime's last word: it ends the container if it cannot write that, and touches nothing after it.
fn wait_until_done(
    container: &Container,
    options: &RestoreOptions,
    process: &ProcessId,
) -> Result<(), OciError> {
    let folder = &options.folder;
    let deadline = Instant::now() + RUNS_WITHIN;
    // podman is the last to know.
    let is_known = || match &container.podman {
        Some(podman) => podman.knows_running(&container.id, process.pid),
        None => restored_process(folder) == Some(process.pid),
    };
    let is_done = || runs(container, process) && is_known();
    while !is_done() {
        let is_at_work = options.strays.any() || Podman::is_restoring(folder);
        let is_over = !is_at_work && !is_done();
        if is_over || Instant::now() > deadline {
            return Err(failure(container, folder, "restore.log", "restoring"));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Lets a container that runs be heard in its network.
fn open(container: &Container, process: &ProcessId, is_open: bool) -> Result<(), OciError> {
    let config = container.config()?;
    network::switch_on(process.pid, &config);
    match is_open {
        true => Ok(()),
        false => Network::of(process.pid).take_over(),
    }
}

/// The network that was there before the container. podman makes one for it.
fn own_network(container: &Container) -> Result<Option<Network>, OciError> {
    match container.podman {
        Some(_) => Ok(None),
        None => Ok(Network::named(&container.config()?)),
    }
}

/// Whether the runtime has a container with this first process, and has let it run.
fn runs(container: &Container, process: &ProcessId) -> bool {
    let state = container.runtime.state_if_any(&container.id);
    let Ok(Some(state)) = state else { return false };
    let has_run = matches!(state.status, Status::Running | Status::Paused);
    has_run && state.pid == process.pid && process.is_alive()
}

/// The first process of the container that was restored in a folder.
fn first_process(folder: &Path) -> Option<ProcessId> {
    serde_json::from_slice(&fs::read(held_process(folder)).ok()?).ok()
}

/// Ends a restore that waits, or will come to wait, or has heard the word: nothing is left of the container. Another
/// one that has its id is left alone.
///
/// It takes the time that CRIU takes to end what it has restored. Says whether nothing is left.
pub fn discard(container: &Container, options: &RestoreOptions) -> bool {
    let folder = &options.folder;
    let _ = fs::write(unwanted(folder), "");
    Podman::end_restores(folder);
    let end = || {
        if let Ok(mut socket) = UnixStream::connect(held_socket(folder)) {
            let _ = socket.write_all(b"end\n");
        }
    };
    let are_gone = options.strays.end_by(&end, HELD_WITHIN);
    let process = first_process(folder).or_else(|| unheld_process(container, folder));
    if let Some(process) = process.filter(ProcessId::is_alive) {
        // Without its CRIU it waits for ever, or it runs. With the first of its processes all end.
        if let Ok(handle) = ProcessHandle::open(Pid(process.pid)) {
            if process.is_alive() {
                let _ = handle.kill();
            }
        }
        let began = Instant::now();
        while process.is_alive() && began.elapsed() < RUNS_WITHIN {
            std::thread::sleep(LOOK);
        }
    }
    if let Some(process) = process {
        let _ = container.forget(&process);
    }
    if let Some(podman) = &container.podman {
        // It may have come to know it, and not its process.
        let _ = podman.remove_if_ended(&container.id);
    }
    put_network_off(container, folder);
    are_gone && !process.is_some_and(|it| it.is_alive())
}

/// The first process of a container that was restored and did not wait: the runtime's last word says which it is.
fn unheld_process(container: &Container, folder: &Path) -> Option<ProcessId> {
    let process = ProcessId::of(restored_process(folder)?)?;
    runs(container, &process).then_some(process)
}

fn put_network_off(container: &Container, folder: &Path) {
    let before = fs::read(prepared_network(folder)).ok();
    let before = before.and_then(|it| serde_json::from_slice::<Openings>(&it).ok());
    let network = own_network(container).ok().flatten();
    if let (Some(before), Some(network)) = (before, network) {
        network.put_off(&before);
    }
}

/// Waits for a runtime that has another to speak to, so that nothing of it is left when it ends.
fn reap(mut runtime: Child) {
    std::thread::spawn(move || runtime.wait());
}
