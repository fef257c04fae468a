//! The page server of a lazily restored guest: a process that outlives the
//! `restore` command and ends when all memory has arrived.

use crate::args::ServeArgs;
use crate::context::Context;
use crate::failure::{Code, Failure};
use crate::frozen_state::unloadable;
use dewar_checkpoint::restore::{DeadRam, PageServer, PageTable, ServeEnd, ServeProgress};
use dewar_guest_qemu::launch::kill;
use dewar_guest_qemu::start_from_state::load_state;
use dewar_guest_qemu::{Qmp, map_ram_files};
use dewar_image::{ImageId, Location, Store};
use dewar_kernel::detach;
use dewar_memory::{Pid, ProcessHandle, UffdOrigin};
use dewar_registry::{GuestFolder, GuestRecord, Phase, ProcessId};
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

const FILE: &str = "server.json";
/// How long one page of a store that is half gone may keep the others waiting.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long a state that is loaded waits for pages of which some are damaged.
const DAMAGE: Duration = Duration::from_secs(3);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(200);
const READY: &str = "ready\n";

/// How far a lazy restore is, as its server last said.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ServerState {
    /// Pages that have arrived.
    pub arrived: u64,
    /// Pages that must arrive.
    pub of: u64,
    /// Those of them that lay in the memory of the guest before.
    #[serde(default)]
    pub reused: u64,
    /// Whether all is there, and no server needed.
    pub complete: bool,
    /// Why some pages cannot be read, if so.
    pub problem: Option<String>,
    /// Whether some are damaged.
    #[serde(default)]
    pub damaged: bool,
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
        let _ = folder.write_for_now(FILE, self);
    }
}

/// What a server is told when it shall begin.
#[derive(Debug, Serialize, Deserialize)]
struct Go {
    /// The guest's.
    process: ProcessId,
    /// The number under which that has `/dev/userfaultfd`, where it needs it.
    device: Option<i32>,
}

/// A server that reads an image's page table while its guest is being made.
/// Dropped before [`Prepared::attach`], it ends.
pub struct Prepared {
    child: Child,
    name: String,
}

/// Starts a server for the guest of `folder`, to be restored from this image.
/// `dead` is the RAM of the guest before, if any; to be kept open until the server
/// is attached.
pub fn prepare(
    context: &Context,
    folder: &GuestFolder,
    store: &str,
    image: &str,
    dead: &[File],
) -> Result<Prepared, Failure> {
    let name = folder.name().to_owned();
    ServerState::default().save(folder);
    let program = std::env::current_exe().map_err(|error| failed(&name, &error.to_string()))?;
    let mut command = Command::new(program);
    command
        .arg("--root")
        .arg(context.registry.root())
        .args(["__serve", &name, "--store", store, "--image", image])
        .args(dead.iter().map(path_for_others))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let spawned = detach(&mut command).spawn();
    let child = spawned.map_err(|error| failed(&name, &error.to_string()))?;
    Ok(Prepared { child, name })
}

impl Prepared {
    /// Lets it serve this process, which is on record now. Returns when every touch of a
    /// missing page waits for it. `origin` is how the process may make a userfaultfd, if it
    /// has none yet.
    pub fn attach(mut self, process: &ProcessId, origin: UffdOrigin) -> Result<ProcessId, Failure> {
        let mut said = String::new();
        let device = match origin {
            UffdOrigin::Device(number) => Some(number),
            UffdOrigin::Syscall => None,
        };
        let go = json!(Go { process: *process, device }).to_string();
        // Where it is gone, what it said before tells why.
        let _ = self.child.stdin.take().map(|mut stdin| stdin.write_all(go.as_bytes()));
        if let Some(stdout) = self.child.stdout.take() {
            stdout
                .take(4096)
                .read_to_string(&mut said)
                .map_err(|error| failed(&self.name, &error.to_string()))?;
        }
        match (said.as_str(), ProcessId::of(self.child.id() as i32)) {
            (READY, Some(process)) => Ok(process),
            // All had arrived before we looked.
            (READY, None) => Ok(ProcessId { pid: self.child.id() as i32, started: 0, boot: 0 }),
            (said, _) => {
                let _ = self.child.wait();
                Err(failed(&self.name, said.trim()))
            }
        }
    }
}

/// Where other processes find an open file that has no name any more.
fn path_for_others(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

fn failed(name: &str, why: &str) -> Failure {
    Failure::new(Code::Failed, format!("the page server of '{name}' failed: {why}"))
}

/// The server's own life.
pub fn serve(context: &Context, args: ServeArgs) -> Result<(), Failure> {
    let folder = context.registry.guest(&args.name)?;
    let result = serve_guest(&folder, args);
    if let Err(why) = &result {
        // Until it said that it is ready, somebody listens.
        let _ = std::io::stdout().write_all(why.as_bytes());
    }
    result.map_err(|why| Failure::new(Code::Failed, why))
}

fn serve_guest(folder: &GuestFolder, args: ServeArgs) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let location = Location::parse(&args.store).map_err(|error| text(&error))?;
    let store = Store::open(&location).map_err(|error| text(&error))?;
    let image = store.open_image(&ImageId(args.image)).map_err(|error| text(&error))?;
    let table = PageTable::read(&image).map_err(|error| text(&error))?;
    // Without them all is read from the image.
    let dead: Vec<File> = args.dead.iter().filter_map(|path| File::open(path).ok()).collect();
    let dead = DeadRam::new(&image, dead).map_err(|error| text(&error))?;
    let Some(told) = told_to_go() else { return Ok(()) };
    // From now on it tries again by itself, and has other pages to serve meanwhile.
    image.set_patience(PATIENCE);
    let record = folder.record().map_err(|error| text(&error))?;
    let files = open_ram(&record).map_err(|error| text(&error))?;
    // The restore that told us may be dead, and another one have begun.
    if !folder.record().is_ok_and(|now| now.process.is_same(&told.process)) {
        return Err("another QEMU has the guest's name now".to_owned());
    }
    // Two servers of one QEMU would not know of each other what has arrived.
    let mine = |file: &File| flock(file, FlockOperation::NonBlockingLockExclusive).is_ok();
    if !files.iter().all(mine) {
        return Err("another page server is at work".to_owned());
    }
    let process = ProcessHandle::open(Pid(record.process.pid)).map_err(|error| text(&error))?;
    let ram = map_ram_files(&record.name, record.process.pid, &record.ram)
        .map_err(|error| text(&error))?;
    let origin = told.device.map_or(UffdOrigin::Syscall, UffdOrigin::Device);
    let server =
        PageServer::attach(table, dead, &process, &ram, origin).map_err(|error| text(&error))?;
    if record.phase == Phase::Restoring {
        // Whatever QEMU put into RAM while it started is not the guest's.
        clear_ram(&record, &files).map_err(|error| text(&error))?;
    }
    let _ = std::io::stdout().write_all(READY.as_bytes());
    close_stdout();
    let last = Mutex::new(ServerState::default());
    // The guest may have ended, and a later restore have a server of its own.
    let save = |state: &ServerState| {
        if folder.record().is_ok_and(|now| now.process.is_same(&record.process)) {
            state.save(folder);
        }
    };
    let told = |progress: &ServeProgress| {
        let state = state_of(progress);
        save(&state);
        *last.lock().unwrap_or_else(|locked| locked.into_inner()) = state;
    };
    let end = server.run(told);
    let last = last.into_inner().unwrap_or_else(|locked| locked.into_inner());
    match end {
        Ok(ServeEnd::Complete) => save(&ServerState { complete: true, ..last }),
        Ok(ServeEnd::GuestEnded) => {}
        // Nobody listens any more.
        Err(error) => {
            let why = format!("{error}; 'dewar restore {}' goes on with it", record.name);
            save(&ServerState { problem: Some(why), ..last });
        }
    }
    Ok(())
}

/// Loads the devices of a guest whose pages its server, if it has one, brings. A page that is
/// damaged never comes: a QEMU that waits for one is ended.
pub fn load_served(
    folder: &GuestFolder,
    record: &GuestRecord,
    qmp: &mut Qmp,
    device_state: Vec<u8>,
) -> Result<(), Failure> {
    let began = Instant::now();
    let loaded = std::thread::scope(|scope| {
        let (loading, loaded) = mpsc::channel::<()>();
        scope.spawn(move || {
            while let Err(mpsc::RecvTimeoutError::Timeout) = loaded.recv_timeout(LOOK) {
                if began.elapsed() > DAMAGE && ServerState::of(folder, record).damaged {
                    kill(&record.process);
                }
            }
        });
        let result = load_state(qmp, device_state);
        drop(loading);
        result
    });
    loaded.map_err(|error| match ServerState::of(folder, record).problem {
        Some(problem) => Failure::new(
            Code::Failed,
            format!("loading the device state: it needs a page: {problem}"),
        ),
        None => unloadable(folder, &error),
    })
}

/// Waits for the guest; nothing where the restore that started us is gone.
fn told_to_go() -> Option<Go> {
    let mut said = Vec::new();
    std::io::stdin().take(4096).read_to_end(&mut said).ok()?;
    serde_json::from_slice(&said).ok()
}

fn open_ram(record: &GuestRecord) -> std::io::Result<Vec<File>> {
    record.ram.iter().map(|file| File::options().write(true).open(&file.path)).collect()
}

fn state_of(progress: &ServeProgress) -> ServerState {
    ServerState {
        arrived: progress.arrived,
        of: progress.of,
        reused: progress.reused,
        complete: false,
        problem: progress.problem.clone(),
        damaged: progress.is_damaged,
    }
}

/// Makes holes of all RAM, so that every first touch is told to us. Only while
/// the guest has not run.
fn clear_ram(record: &GuestRecord, files: &[File]) -> std::io::Result<()> {
    for (file, opened) in record.ram.iter().zip(files) {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(opened, how, 0, file.bytes)?;
    }
    Ok(())
}

/// Lets the restore that started us read to the end.
fn close_stdout() {
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(&null);
    }
}
