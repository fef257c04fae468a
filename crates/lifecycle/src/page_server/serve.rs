//! The page server's own life.

use super::go::Go;
use super::state::ServerState;
use crate::failure::{Code, Failure};
use crate::helper::Parent;
use dewar_checkpoint::restore::{CrashedRam, PageServer, PageTable, ServeEnd, ServeProgress};
use dewar_guest_qemu::map_ram_files;
use dewar_image::{ImageId, Location, Store};
use dewar_memory::{Pid, ProcessHandle, UffdOrigin};
use dewar_registry::{GuestFolder, GuestRecord, Phase, Registry};
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

/// How long one page of a store that is half gone may keep the others waiting.
const PATIENCE: Duration = Duration::from_millis(500);

/// Where the pages come from.
#[derive(Debug)]
pub struct Source {
    /// The store, by its URL.
    pub store: String,
    /// The image.
    pub image: String,
    /// RAM files of the guest before, in the order of the image's regions.
    pub dead: Vec<PathBuf>,
}

/// The server's own life.
///
/// # Errors
/// Where it cannot serve; the command that waits for it is told.
pub fn serve(registry: &Registry, name: &str, source: Source) -> Result<(), Failure> {
    let folder = registry.guest(name)?;
    let broken = |error: std::io::Error| Failure::new(Code::Failed, format!("server: {error}"));
    let mut parent = Parent::of_this_process().map_err(broken)?;
    let result = serve_guest(&folder, source, &mut parent);
    if let Err(why) = &result {
        parent.fail(why);
    }
    result.map_err(|why| Failure::new(Code::Failed, why))
}

fn serve_guest(folder: &GuestFolder, source: Source, parent: &mut Parent) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let location = Location::parse(&source.store).map_err(|error| text(&error))?;
    let store = Store::open(&location).map_err(|error| text(&error))?;
    let image = store.open_image(&ImageId(source.image)).map_err(|error| text(&error))?;
    let table = PageTable::read(&image).map_err(|error| text(&error))?;
    // Without them all is read from the image.
    let dead: Vec<File> = source.dead.iter().filter_map(|path| File::open(path).ok()).collect();
    let dead = CrashedRam::new(&image, dead).map_err(|error| text(&error))?;
    // Nothing where the restore that started us is gone.
    let Some(go) = parent.receive::<Go>() else { return Ok(()) };
    // From now on it tries again by itself, and has other pages to serve meanwhile.
    image.set_patience(PATIENCE);
    let record = folder.record().map_err(|error| text(&error))?;
    let files = open_ram(&record).map_err(|error| text(&error))?;
    // The restore that told us may be dead, and another one have begun.
    if !folder.record().is_ok_and(|now| now.process.is_same(&go.process)) {
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
    let origin = go.device.map_or(UffdOrigin::Syscall, UffdOrigin::Device);
    let server =
        PageServer::attach(table, dead, &process, &ram, origin).map_err(|error| text(&error))?;
    if record.phase == Phase::Restoring {
        // Whatever QEMU put into RAM while it started is not the guest's.
        clear_ram(&record, &files).map_err(|error| text(&error))?;
    }
    let _ = parent.ready();
    let last = Mutex::new(ServerState::default());
    // The guest may have ended, and a later restore have a server of its own.
    let save = |state: &ServerState| {
        if folder.record().is_ok_and(|now| now.process.is_same(&record.process)) {
            state.save(folder);
        }
    };
    let report = |progress: &ServeProgress| {
        let state = state_of(progress);
        save(&state);
        *last.lock().unwrap_or_else(|locked| locked.into_inner()) = state;
    };
    let end = server.run(report);
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
