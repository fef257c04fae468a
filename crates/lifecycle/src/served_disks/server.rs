//! The process that serves a guest's disks.

use super::disks::{READY_WITHIN, ServedDisks, start};
use super::state::{DiskState, SearchState, ServedState};
use crate::failure::{Code, Failure};
use crate::helper::Parent;
use crate::host::Host;
use dewar_blockcache::{
    BlockError, DiskFile, DiskOptions, Export, Found, Hasher, KeptMemory, find, serve as serve_nbd,
};
use dewar_guest_qemu::QemuUser;
use dewar_guest_qemu::cmdline::DISKS_SOCKET_FILE;
use dewar_registry::{GuestFolder, Phase};
use dewar_units::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, Permissions};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The supervisor's words: memory of before a reset comes; the guest has ended.
pub(super) const MEMORY: u8 = b'm';
pub(super) const ENDED: u8 = b'e';
/// How long what was found in memory is kept for a guest that does not ask for it.
const KEPT_FOR: Duration = Duration::from_secs(600);
/// How many seconds that is in tests, and where pressure is read there.
const TEST_KEPT_FOR: &str = "DEWAR_TEST_KEPT_FOR";
const TEST_PRESSURE: &str = "DEWAR_TEST_PRESSURE";
/// How much of ten seconds some program may wait for memory, in hundredths (`some avg10` in Documentation/accounting/psi.rst
/// of Linux), before what is kept is given up.
const PRESSURE: f64 = 10.0;
const TICK: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(50);

/// What comes beside memory.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Aside {
    /// How many files come after this.
    pub(super) files: usize,
    /// Most pages that may be kept of it.
    pub(super) most_pages: u64,
    /// Which of the guest's resets it was.
    pub(super) reset: u64,
}

struct Server {
    folder: GuestFolder,
    hasher: Arc<Hasher>,
    exports: Vec<(String, Arc<Export>)>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    found_at: Option<Instant>,
    search: Option<SearchState>,
    released: Option<String>,
}

/// The server's own life.
///
/// # Errors
/// Where the disks cannot be served; the supervisor is told.
pub fn serve(host: &Host, name: &str) -> Result<(), Failure> {
    let folder = host.registry.guest(name)?;
    let broken =
        |error: std::io::Error| Failure::new(Code::Failed, format!("disk server: {error}"));
    let mut parent = Parent::of_this_process().map_err(broken)?;
    let server = match Server::open(&folder) {
        Ok(server) => server,
        Err(failure) => {
            parent.fail(&failure.whole());
            return Err(failure);
        }
    };
    parent.ready().map_err(broken)?;
    let mut word = [0];
    loop {
        match parent.socket().read(&mut word) {
            Ok(1) if word[0] == MEMORY => server.take_memory(&mut parent),
            Ok(1) => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            _ => break,
        }
    }
    // The supervisor was killed. QEMU waits until the next one's server is there; a guest that is about to start has the
    // lock of the command that starts it.
    let has_disks = || ServedDisks::of(&folder).is_ok_and(|disks| disks.is_some());
    let runs = || folder.record().is_ok_and(|record| record.process.is_alive());
    // Where one had them already, and is gone, a command wants them for itself.
    let had_one = server.now().disks.iter().any(|disk| disk.from_disk + disk.from_memory > 0);
    let is_awaited = || !had_one && folder.try_lock().is_err();
    let is_needed = || has_disks() && (runs() || is_awaited());
    while is_needed() && start(folder.root(), "__disks", name).is_err() {
        std::thread::sleep(TICK);
    }
    Ok(())
}

impl Server {
    fn open(folder: &GuestFolder) -> Result<Arc<Self>, Failure> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Failure::new(Code::Failed, format!("cannot {what}: {error}"))
        };
        let none = || Failure::new(Code::Failed, "it has no disks that are served");
        let ServedDisks { disks, memory_bytes } = ServedDisks::of(folder)?.ok_or_else(none)?;
        let hasher =
            Arc::new(Hasher::new().map_err(|error| failed("read random numbers", &error))?);
        let blocks = memory_bytes as usize / PAGE_BYTES;
        let record = folder.record_if_any()?;
        // Another host may be about to take the locks.
        let is_leaving = record.as_ref().is_some_and(|record| record.phase == Phase::Leaving);
        let mut exports = Vec::new();
        for disk in &disks {
            let options = DiskOptions {
                path: disk.path.clone(),
                is_read_only: disk.is_read_only,
                is_qcow2: disk.format == "qcow2",
                // The guest caches it; the host need not, too.
                is_direct: true,
                locks_later: is_leaving,
            };
            let opened = open_when_free(&options)
                .map_err(|error| Failure::new(Code::Failed, error.to_string()))?;
            let most = if disk.is_warm { blocks } else { 0 };
            exports.push((disk.id.clone(), Arc::new(Export::new(opened, hasher.clone(), most))));
        }
        let socket = folder.file(DISKS_SOCKET_FILE);
        let _ = fs::remove_file(&socket);
        let listener =
            UnixListener::bind(&socket).map_err(|error| failed("listen for QEMU", &error))?;
        fs::set_permissions(&socket, Permissions::from_mode(0o600))
            .map_err(|error| failed("close the socket to others", &error))?;
        // One that becomes another user connects as that, where it connects again. The record of one that has ended says
        // nothing of the one that comes.
        let record = record.filter(|record| record.process.is_alive());
        let line = record.map(|record| record.arguments).unwrap_or_default();
        if let Ok(Some(user)) = QemuUser::of(&line) {
            user.give(&socket, folder.root()).map_err(|error| failed("let QEMU in", &error))?;
        }
        let served = exports.clone();
        std::thread::spawn(move || -> () { serve_nbd(&listener, &served) });
        let server = Arc::new(Self {
            folder: folder.clone(),
            hasher,
            exports,
            state: Mutex::new(State::default()),
        });
        let watching = server.clone();
        std::thread::spawn(move || watching.watch());
        Ok(server)
    }

    /// Takes the memory that the guest had, and searches it beside all else.
    fn take_memory(self: &Arc<Self>, parent: &mut Parent) {
        let Some(Aside { files, most_pages, reset }) = parent.receive() else { return };
        let files: Vec<File> =
            (0..files).map_while(|_| parent.receive_fd().ok().map(File::from)).collect();
        let server = self.clone();
        std::thread::spawn(move || {
            // From here on: what was found before counts as long as this.
            server.state().found_at = Some(Instant::now());
            let found = server.search(files, most_pages);
            let mut state = server.state();
            match found {
                Ok(found) => {
                    state.search = Some(told(&found, reset));
                    state.released = None;
                }
                Err(error) => state.released = Some(error.to_string()),
            }
            drop(state);
            server.tell();
        });
    }

    fn search(&self, files: Vec<File>, most_pages: u64) -> Result<Found, BlockError> {
        let exports: Vec<Arc<Export>> = self.exports.iter().map(|(_, it)| it.clone()).collect();
        let mut all = Found::default();
        for file in files {
            let memory = Arc::new(KeptMemory::new(file)?);
            all.add(&find(&memory, &exports, &self.hasher, most_pages - all.kept)?);
        }
        Ok(all)
    }

    /// Gives up what is kept for too long, or where the host is short of memory.
    fn watch(&self) {
        let mut last = ServedState::default();
        let asked = std::env::var(TEST_KEPT_FOR).ok().and_then(|seconds| seconds.parse().ok());
        let kept_for = asked.map_or(KEPT_FOR, Duration::from_secs);
        loop {
            std::thread::sleep(TICK);
            let kept: usize = self.exports.iter().map(|(_, it)| it.known_and_kept().1).sum();
            let found_at = self.state().found_at;
            let why = match found_at {
                _ if kept == 0 => None,
                Some(at) if at.elapsed() > kept_for => Some("nobody asked for it for long"),
                _ if pressure() > PRESSURE => Some("the host is short of memory"),
                _ => None,
            };
            if let Some(why) = why {
                self.exports.iter().for_each(|(_, export)| export.release_all());
                self.state().released = Some(format!("{kept} pages: {why}"));
            }
            let now = self.now();
            if now != last {
                now.save(&self.folder);
                last = now;
            }
        }
    }

    fn tell(&self) {
        self.now().save(&self.folder);
    }

    fn now(&self) -> ServedState {
        let disks = self.exports.iter().map(|(id, export)| {
            let (from, (known, kept)) = (export.read_from(), export.known_and_kept());
            DiskState {
                id: id.clone(),
                from_memory: from.memory,
                from_disk: from.disk,
                wrong: from.wrong,
                known: known as u64,
                kept: kept as u64,
            }
        });
        let disks = disks.collect();
        let state = self.state();
        ServedState { disks, search: state.search.clone(), released: state.released.clone() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|broken| broken.into_inner())
    }
}

fn told(found: &Found, reset: u64) -> SearchState {
    SearchState {
        reset,
        known: found.known,
        pages: found.pages,
        kept: found.kept,
        refused: found.refused,
        too_many: found.too_many,
        took_ms: found.took.as_secs_f64() * 1e3,
    }
}

/// Opens a disk; the server before this one may be ending, and have it in use for a moment more.
fn open_when_free(options: &DiskOptions) -> Result<DiskFile, BlockError> {
    let deadline = Instant::now() + READY_WITHIN / 6;
    loop {
        match DiskFile::open(options) {
            Err(BlockError::InUse { .. }) if Instant::now() < deadline => std::thread::sleep(AGAIN),
            opened => return opened,
        }
    }
}

/// How much of the last ten seconds some program waited for memory, in hundredths; 0 where the kernel does not tell.
fn pressure() -> f64 {
    let file = std::env::var_os(TEST_PRESSURE).unwrap_or_else(|| "/proc/pressure/memory".into());
    let text = fs::read_to_string(file).unwrap_or_default();
    let some = text.lines().find_map(|line| line.strip_prefix("some avg10="));
    some.and_then(|rest| rest.split(' ').next()?.parse().ok()).unwrap_or(0.0)
}
