//! A container that is restored but for one word ([`crate::relay`]).

use crate::container::Container;
use crate::dump::failure;
use crate::error::OciError;
use crate::network;
use crate::relay::{GO, put_before_criu, socket, unwanted};
use crate::restore::{RestoreOptions, restore_command};
use crate::runtime::find_program;
use dewar_kernel::peer_of;
use dewar_registry::ProcessId;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// How long CRIU may take to come to the last step.
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
    folder: PathBuf,
    socket: UnixStream,
    /// The runtime, where we have started it.
    runtime: Option<Child>,
}

impl HeldRestore {
    /// Restores a container, which the runtime must not know, up to the last step.
    ///
    /// # Errors
    /// Where it cannot be restored; there is no container then.
    pub fn begin(container: &Container, options: &RestoreOptions) -> Result<Self, OciError> {
        let folder = &options.folder;
        let mut command = restore_command(container, options)?;
        let criu = find_program(Path::new("criu")).ok_or_else(|| OciError::NoRuntime {
            program: "criu".into(),
            cause: io::ErrorKind::NotFound.into(),
        })?;
        put_before_criu(&mut command, &criu, folder).map_err(OciError::io("prepare", folder))?;
        let mut runtime = dewar_kernel::detach(&mut command).spawn().map_err(|cause| {
            OciError::NoRuntime { program: container.runtime.program.clone(), cause }
        })?;
        let deadline = Instant::now() + HELD_WITHIN;
        loop {
            if let Ok(socket) = UnixStream::connect(socket(folder)) {
                let (container, folder) = (container.clone(), folder.clone());
                return Ok(Self { container, folder, socket, runtime: Some(runtime) });
            }
            if !matches!(runtime.try_wait(), Ok(None)) || Instant::now() > deadline {
                discard(container, options);
                let _ = runtime.wait();
                return Err(failure(container, folder, "restore.log", "restoring"));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The one that waits in a folder.
    pub fn find(container: &Container, folder: &Path) -> Option<Self> {
        let socket = UnixStream::connect(socket(folder)).ok()?;
        let (container, folder) = (container.clone(), folder.to_owned());
        Some(Self { container, folder, socket, runtime: None })
    }

    /// The process that keeps it: if that ends the container does.
    pub fn holder(&self) -> Option<ProcessId> {
        let pid = peer_of(&self.socket).ok()??;
        ProcessId::of(pid.0)
    }

    /// Lets it run. Returns its first process.
    ///
    /// # Errors
    /// Where it does not come to run.
    pub fn run(mut self) -> Result<ProcessId, OciError> {
        let folder = self.folder.clone();
        self.socket.write_all(GO).map_err(OciError::io("let run what waits in", &folder))?;
        let _ = self.socket.set_read_timeout(Some(RUNS_WITHIN));
        // The relay ends when CRIU does.
        let _ = self.socket.read(&mut [0]);
        let deadline = Instant::now() + RUNS_WITHIN;
        let process = loop {
            let has_ended = self.runtime.as_mut().map(|it| !matches!(it.try_wait(), Ok(None)));
            match self.container.process() {
                Ok(process) if has_ended != Some(false) => break process,
                Err(_) if has_ended == Some(true) || Instant::now() > deadline => {
                    return Err(failure(&self.container, &folder, "restore.log", "restoring"));
                }
                _ => std::thread::sleep(LOOK),
            }
        };
        let config = self.container.config()?;
        network::switch_on(process.pid, &config);
        network::open(process.pid, true)?;
        Ok(process)
    }
}

/// Ends a restore that waits, or will come to wait: nothing is left of the container.
///
/// It takes the time that CRIU takes to end what it has restored.
pub fn discard(container: &Container, options: &RestoreOptions) {
    let folder = &options.folder;
    let _ = fs::write(unwanted(folder), "");
    if let Ok(mut socket) = UnixStream::connect(socket(folder)) {
        let _ = socket.write_all(b"end\n");
    }
    options.strays.end_all();
    // Where nothing was restored the runtime knows none.
    let _ = container.runtime.delete(&container.id);
}
