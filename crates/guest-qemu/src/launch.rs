//! Starting a QEMU in the background.

use crate::cmdline::{PlannedRegion, RunPlan};
use crate::qmp::{Qmp, QmpError};
use crate::ram_room::RamRoom;
use dewar_kernel::{KernelError, Pid, ProcessHandle, detach, in_network, inherit};
use dewar_registry::{ProcessId, remove_ram_file};
use dewar_units::ByteSize;
use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a QEMU may take to offer its QMP socket, and to greet on it.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// And for each GiB of RAM that it is to take in advance. (A core zeroes some GiB in a
/// second; a host that looks for huge pages is slower.)
const PREALLOCATES_GIB_WITHIN: Duration = Duration::from_secs(10);
/// How long a killed process may take to be gone: its memory is unmapped first.
const ENDS_WITHIN: Duration = Duration::from_secs(30);
const KILLED_AGAIN_AFTER: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(2);
/// Most bytes of a log that are shown.
const SHOWN: u64 = 4096;
/// How the names of variables begin that are meant for Dewar.
const OUR_VARIABLES: &[u8] = b"DEWAR_";

/// Why a QEMU did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// There is no room for the guest's RAM.
    #[error("no room for the RAM file {}: it needs {needed}, and there is {room}", path.display())]
    NoRoom {
        /// The file, or the first of them.
        path: PathBuf,
        /// Their size.
        needed: ByteSize,
        /// What there is.
        room: RamRoom,
    },
    /// A file could not be made.
    #[error("cannot {operation} {}: {cause}", path.display())]
    File {
        /// What was being done.
        operation: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system answered.
        cause: std::io::Error,
    },
    /// The program did not start, or ended at once.
    #[error("{} did not start: {said}", program.display())]
    Program {
        /// The program.
        program: PathBuf,
        /// What it printed, or what the system answered.
        said: String,
    },
    /// It runs but does not talk to us.
    #[error("{} does not offer its QMP socket: {cause}", program.display())]
    Mute {
        /// The program.
        program: PathBuf,
        /// Why.
        cause: QmpError,
    },
}

/// A QEMU that was just started.
#[derive(Debug)]
pub struct Launched {
    /// Its process.
    pub process: ProcessId,
    /// The connection to it.
    pub qmp: Qmp,
}

/// Makes the RAM files that are ours, empty, and sees that there is room for them: `look`
/// tells what there is in a folder, with those files among what is promised, and `coming`
/// bytes that others are giving back there. (In this order two that are made at once may
/// both be refused, and never both be admitted.) What was made is removed again where it
/// fails.
///
/// # Errors
/// Where there is no room, or a file cannot be made.
pub fn make_ram_files(
    regions: &[PlannedRegion],
    coming: u64,
    look: impl Fn(&Path) -> Result<RamRoom, KernelError>,
) -> Result<Vec<PathBuf>, LaunchError> {
    let mut made = Vec::new();
    let owned = || regions.iter().filter(|region| region.owned);
    let result = owned().try_for_each(|region| {
        let path = &region.path;
        let failed = |operation| move |cause| file_error(operation, path, cause);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(failed("create"))?;
        made.push(path.clone());
        file.set_len(region.bytes).map_err(failed("size"))
    });
    let result = result.and_then(|()| {
        let Some(first) = owned().next() else { return Ok(()) };
        let needed: u64 = owned().map(|region| region.bytes).sum();
        let folder = first.path.parent().unwrap_or(Path::new("/"));
        let room =
            look(folder).map_err(|error| file_error("look for room in", folder, error.cause))?;
        let free = room.free.saturating_add(coming);
        // Where the kernel reserves the pages itself, our files are not among what is promised.
        let others = room.promised.saturating_sub(needed);
        if free >= others.saturating_add(needed) {
            return Ok(());
        }
        let room = RamRoom { free, promised: others };
        Err(LaunchError::NoRoom { path: first.path.clone(), needed: ByteSize(needed), room })
    });
    match result {
        Ok(()) => Ok(made),
        Err(error) => {
            remove_files(&made);
            Err(error)
        }
    }
}

fn file_error(operation: &'static str, path: &Path, cause: std::io::Error) -> LaunchError {
    LaunchError::File { operation, path: path.to_owned(), cause }
}

/// Removes files, as far as they can be.
pub fn remove_files(paths: &[PathBuf]) {
    for path in paths {
        let _ = remove_ram_file(path);
    }
}

/// What a program has from us besides its command line.
#[derive(Debug, Default)]
pub struct Inherited {
    /// Open files, under the numbers that they have here.
    pub files: Vec<OwnedFd>,
    /// A network namespace other than ours.
    pub network: Option<OwnedFd>,
}

/// Starts `program` with a planned command line; what it prints goes to `log`.
///
/// # Errors
/// Where it does not start; then no process is left.
pub fn launch(
    program: &Path,
    plan: &RunPlan,
    folder: &Path,
    log: &Path,
    qmp_path: &Path,
    inherited: Inherited,
) -> Result<Launched, LaunchError> {
    let printed = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(log)
        .map_err(|cause| file_error("open", log, cause))?;
    let start = printed.metadata().map_or(0, |data| data.len());
    let second = printed.try_clone().map_err(|cause| file_error("open", log, cause))?;
    let _ = fs::remove_file(qmp_path);
    let mut command = Command::new(program);
    command
        .args(&plan.arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::from(printed))
        .stderr(Stdio::from(second));
    without_ours(&mut command);
    if let Some(network) = inherited.network {
        in_network(&mut command, network);
    }
    let mut child = inherit(detach(&mut command), inherited.files).spawn().map_err(|cause| {
        LaunchError::Program { program: program.to_owned(), said: cause.to_string() }
    })?;
    let launched = wait_ready(&mut child, program, plan, qmp_path);
    if let Err(LaunchError::Program { program, .. }) = launched {
        let said = said_since(log, start);
        return Err(LaunchError::Program { program, said });
    }
    if launched.is_err() {
        // It may run but will never be ours.
        let _ = child.kill();
        let _ = child.wait();
    }
    launched
}

/// Takes what is meant for Dewar, a store's password say, out of a program's environment: it is
/// not the guest's to know, should it take a QEMU over or mislead a tool that reads its disk.
pub fn without_ours(command: &mut Command) -> &mut Command {
    let ours = std::env::vars_os().map(|(name, _)| name);
    ours.filter(|name| name.as_bytes().starts_with(OUR_VARIABLES)).for_each(|name| {
        command.env_remove(name);
    });
    command
}

fn wait_ready(
    child: &mut Child,
    program: &Path,
    plan: &RunPlan,
    qmp_path: &Path,
) -> Result<Launched, LaunchError> {
    let gib: u64 = plan.regions.iter().map(|region| region.bytes >> 30).sum();
    let preallocates = plan.arguments.iter().any(|word| word.contains("prealloc"));
    let more = if preallocates { PREALLOCATES_GIB_WITHIN } else { Duration::ZERO };
    let deadline = Instant::now() + READY_WITHIN + more * u32::try_from(gib).unwrap_or(u32::MAX);
    loop {
        let ended = child.try_wait().ok().flatten();
        // A QEMU that puts itself in the background ends its first process.
        if ended.is_some_and(|status| !(plan.daemonizes && status.success())) {
            return Err(LaunchError::Program { program: program.to_owned(), said: String::new() });
        }
        let cause = match Qmp::connect(qmp_path) {
            Ok(qmp) => {
                let pid = qmp.peer_pid().unwrap_or(0);
                if let Some(process) = ProcessId::of(pid) {
                    return Ok(Launched { process, qmp });
                }
                QmpError::Closed
            }
            Err(error) => error,
        };
        if Instant::now() > deadline {
            return Err(LaunchError::Mute { program: program.to_owned(), cause });
        }
        std::thread::sleep(POLL);
    }
}

/// What was printed to the log since it had `start` bytes.
fn said_since(log: &Path, start: u64) -> String {
    printed_since(log, start).unwrap_or_else(|| "it ended without a word".to_owned())
}

/// The last lines of a log.
pub fn last_words(log: &Path) -> Option<String> {
    let bytes = fs::metadata(log).ok()?.len();
    let said = printed_since(log, bytes.saturating_sub(SHOWN))?;
    let lines: Vec<&str> = said.split("; ").collect();
    Some(lines[lines.len().saturating_sub(3)..].join("; "))
}

fn printed_since(log: &Path, start: u64) -> Option<String> {
    use std::io::{Read, Seek, SeekFrom};
    let mut bytes = Vec::new();
    let mut file = File::open(log).ok()?;
    file.seek(SeekFrom::Start(start)).ok()?;
    file.take(SHOWN).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim();
    // A guest may write there, by a serial port on the terminal: what it says is no command.
    let shown = |letter: char| if letter.is_control() && letter != '\n' { ' ' } else { letter };
    let text: String = text.chars().map(shown).collect();
    (!text.trim().is_empty()).then(|| text.replace('\n', "; "))
}

/// Ends a process by SIGKILL and waits until it is gone; says whether it is. One that waits
/// for a device that does not answer may stay.
pub fn kill(process: &ProcessId) -> bool {
    let deadline = Instant::now() + ENDS_WITHIN;
    // Again, where it could not be seen.
    while process.is_alive() && Instant::now() < deadline {
        let handle = ProcessHandle::open(Pid(process.pid)).ok();
        if let Some(handle) = handle.filter(|_| process.is_seen()) {
            let _ = handle.kill();
        }
        if process.ends_within(KILLED_AGAIN_AFTER) {
            return true;
        }
    }
    !process.is_alive()
}

/// Ends QEMUs that were to offer this socket and that nobody knows of: their
/// starter died before it could note them. `known` is none of them: the socket had
/// another name since, but a command line stays as it was.
pub fn end_strays(socket: &Path, known: Option<&ProcessId>) {
    // One that was just forked may not have its own command line yet.
    for _ in 0..3 {
        let strays = processes_naming(socket);
        for stray in strays.iter().filter(|stray| !known.is_some_and(|it| it.is_same(stray))) {
            kill(stray);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Processes that have this path in a word of their command line.
fn processes_naming(path: &Path) -> Vec<ProcessId> {
    let wanted = format!("path={},", path.display().to_string().replace(',', ",,"));
    let all = procfs::process::all_processes().into_iter().flatten().flatten();
    // One in a container sees other files under that name.
    let same_root = |pid: i32| {
        let root = |path: String| fs::metadata(path).map(|data| (data.dev(), data.ino())).ok();
        root(format!("/proc/{pid}/root")) == root("/proc/self/root".to_owned())
    };
    all.filter(|process| same_root(process.pid))
        .filter(|process| {
            process.cmdline().is_ok_and(|words| words.iter().any(|word| word.contains(&wanted)))
        })
        .filter_map(|process| ProcessId::of(process.pid))
        .collect()
}
