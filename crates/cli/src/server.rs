//! The page server of a lazily restored guest: a process that outlives the
//! `restore` command and ends when all memory has arrived.

use crate::args::ServeArgs;
use crate::context::Context;
use crate::failure::{Code, Failure};
use dewar_checkpoint::restore::{PageServer, ServeEnd, ServeProgress};
use dewar_guest_qemu::map_ram_files;
use dewar_guest_qemu::registry::{GuestFolder, GuestRecord, Phase, ProcessId};
use dewar_image::{ImageId, Location, Store};
use dewar_kernel::detach;
use dewar_memory::{Pid, ProcessHandle, UffdOrigin};
use rustix::fs::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

const FILE: &str = "server.json";
const READY: &str = "ready\n";

/// How far a lazy restore is, as its server last said.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ServerState {
    /// Pages that have arrived.
    pub arrived: u64,
    /// Pages that must arrive.
    pub of: u64,
    /// Whether all is there, and no server needed.
    pub complete: bool,
    /// Why some pages cannot be read, if so.
    pub problem: Option<String>,
}

impl ServerState {
    /// What the last server of a guest said; a guest that never had one is
    /// complete.
    pub fn of(folder: &GuestFolder, record: &GuestRecord) -> Self {
        match (&record.server, folder.read(FILE)) {
            (None, _) => Self { complete: true, ..Self::default() },
            (Some(_), Ok(Some(state))) => state,
            (Some(_), _) => Self::default(),
        }
    }

    fn save(&self, folder: &GuestFolder) {
        // It only tells how far we are; the next one will be written.
        let _ = folder.write(FILE, self);
    }
}

/// Starts a server for a guest, and returns when every touch of a missing page
/// waits for it.
pub fn start(context: &Context, folder: &GuestFolder) -> Result<ProcessId, Failure> {
    let failed = |why: String| {
        Failure::new(Code::Failed, format!("the page server of '{}' failed: {why}", folder.name()))
    };
    ServerState::default().save(folder);
    let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let mut command = Command::new(program);
    command
        .arg("--root")
        .arg(context.registry.root())
        .args(["__serve", folder.name()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = detach(&mut command).spawn().map_err(|error| failed(error.to_string()))?;
    let mut said = String::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(4096).read_to_string(&mut said).map_err(|error| failed(error.to_string()))?;
    }
    match (said.as_str(), ProcessId::of(child.id() as i32)) {
        (READY, Some(process)) => Ok(process),
        // All had arrived before we looked.
        (READY, None) => Ok(ProcessId { pid: child.id() as i32, started: 0 }),
        (said, _) => {
            let _ = child.wait();
            Err(failed(said.trim().to_owned()))
        }
    }
}

/// The server's own life.
pub fn serve(context: &Context, args: ServeArgs) -> Result<(), Failure> {
    let folder = context.registry.guest(&args.name)?;
    let result = serve_guest(&folder);
    if let Err(why) = &result {
        // Until it said that it is ready, somebody listens.
        let _ = std::io::stdout().write_all(why.as_bytes());
    }
    result.map_err(|why| Failure::new(Code::Failed, why))
}

fn serve_guest(folder: &GuestFolder) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let record = folder.record().map_err(|error| text(&error))?;
    let origin = record.origin.as_ref().ok_or("it was not restored from a checkpoint")?;
    let location = Location::parse(&origin.store).map_err(|error| text(&error))?;
    let store = Store::open(&location).map_err(|error| text(&error))?;
    let image = store.open_image(&ImageId(origin.image.clone())).map_err(|error| text(&error))?;
    let process = ProcessHandle::open(Pid(record.process.pid)).map_err(|error| text(&error))?;
    let ram = map_ram_files(&record.name, record.process.pid, &record.ram)
        .map_err(|error| text(&error))?;
    let server = PageServer::attach(&image, &process, &ram, UffdOrigin::Syscall)
        .map_err(|error| text(&error))?;
    if record.phase == Phase::Restoring {
        // Whatever QEMU put into RAM while it started is not the guest's.
        clear_ram(&record).map_err(|error| text(&error))?;
    }
    let _ = std::io::stdout().write_all(READY.as_bytes());
    close_stdout();
    let told = |progress: &ServeProgress| state_of(progress, false).save(folder);
    let end = server.run(told).map_err(|error| text(&error))?;
    if end == ServeEnd::Complete {
        let all = ServeProgress { arrived: 0, of: 0, problem: None };
        state_of(&all, true).save(folder);
    }
    Ok(())
}

fn state_of(progress: &ServeProgress, complete: bool) -> ServerState {
    ServerState {
        arrived: progress.arrived,
        of: progress.of,
        complete,
        problem: progress.problem.clone(),
    }
}

/// Makes holes of all RAM, so that every first touch is told to us. Only while
/// the guest has not run.
fn clear_ram(record: &GuestRecord) -> std::io::Result<()> {
    for file in &record.ram {
        let opened = File::options().write(true).open(&file.path)?;
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&opened, how, 0, file.bytes)?;
    }
    Ok(())
}

/// Lets whoever started us read to the end.
fn close_stdout() {
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(&null);
    }
}
