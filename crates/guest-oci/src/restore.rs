//! A container comes back from a folder of CRIU's images.

use crate::container::Container;
use crate::dump::failure;
use crate::error::OciError;
use crate::folder::{images, pid_file, runtime_log, settings, work};
use crate::network::{self, Network};
use crate::runtime::option;
use crate::strays::Strays;
use dewar_registry::ProcessId;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// How a container shall come back.
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// Whose processes these are, to those who find them later.
    pub strays: Strays,
    /// The folder, with `images` in it.
    pub folder: PathBuf,
    /// Whether the TCP connections go on. Those of a container that was saved some time ago are dead at
    /// the other end: they come back closed.
    pub connections: bool,
}

/// Restores a container, which nobody must know. Returns it, as it is known now, and its first process.
///
/// One of podman's has had its archive put together in the folder ([`crate::Definition::put_together`]).
///
/// # Errors
/// Where it does not come back; there is no container then.
pub fn restore(
    container: &Container,
    options: &RestoreOptions,
) -> Result<(Container, ProcessId), OciError> {
    let mut command = started(container, runtime_command(container, options)?, options)?;
    let status = command.status().map_err(|cause| OciError::NoRuntime {
        program: container.runtime.program.clone(),
        cause,
    })?;
    if !status.success() {
        let error = failure(container, &options.folder, "restore.log", "restoring");
        // Unless somebody started one under this id meanwhile, what there may be of it is ours, and no container.
        if !error.is_of_taken_id() {
            let _ = container.delete();
        }
        return Err(error);
    }
    // It runs, and a failure says that it does not.
    begin_to_run(container).inspect_err(|_| {
        let _ = container.delete();
    })
}

/// What is to be done when a container has just begun to run. Returns it, as it is known now, and its first process.
fn begin_to_run(container: &Container) -> Result<(Container, ProcessId), OciError> {
    let (container, process) = match &container.podman {
        Some(podman) => Container::find_by_podman(podman, &container.id)?,
        None => (container.clone(), container.process()?),
    };
    let config = container.config()?;
    network::switch_on(process.pid, &config);
    if let Some(network) = Network::named(&config) {
        // One that left for another host had it closed.
        network.open_if_closed()?;
    }
    Ok((container, process))
}

/// The command that starts the runtime's: podman does, or nobody has to.
pub(crate) fn started(
    container: &Container,
    runtime: Command,
    options: &RestoreOptions,
) -> Result<Command, OciError> {
    let RestoreOptions { folder, .. } = options;
    let log = runtime_log(folder);
    let said = File::create(&log).map_err(OciError::io("create", &log))?;
    let mut command = match &container.podman {
        Some(podman) => podman.restore_command(&runtime, folder)?,
        None => runtime,
    };
    command.stdout(Stdio::null()).stderr(said);
    Ok(command)
}

/// The runtime's command for it.
pub(crate) fn runtime_command(
    container: &Container,
    options: &RestoreOptions,
) -> Result<Command, OciError> {
    let RestoreOptions { folder, strays, connections } = options;
    let path = settings(folder);
    let close = if *connections { "" } else { "tcp-close\n" };
    // podman has no option for unix sockets. Rules that a killed CRIU leaves are looked for where iptables has them.
    let text = format!("network-lock iptables\n{close}ext-unix-sk\n");
    fs::write(&path, text).map_err(OciError::io("write", &path))?;
    let work = work(folder);
    fs::create_dir_all(&work).map_err(OciError::io("create", &work))?;
    let mut command = container.runtime.command("restore");
    command
        .args(["--detach", "--file-locks", "--ext-unix-sk", "--tcp-established"])
        .args(option("--image-path", &images(folder)))
        .args(option("--work-path", &work))
        .args(option("--bundle", &container.bundle))
        .env("CRIU_CONFIG_FILE", &path);
    command.args(option("--pid-file", &pid_file(folder)));
    strays.mark(&mut command);
    command.arg("--").arg(&container.id);
    Ok(command)
}

/// The first process of the container that a restore into this folder brought back, if it came so far.
pub fn restored_process(folder: &Path) -> Option<i32> {
    fs::read_to_string(pid_file(folder)).ok()?.trim().parse().ok()
}
