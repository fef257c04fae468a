//! The guardian: a small process that puts the guest back if this one dies.
//!
//! It is started before the guest is touched, in a session of its own, and
//! gets copies of the QMP connection and of the guest's lock. It waits on a
//! socket. One byte says that all is well and it ends; an end of file without
//! that byte says that the command died: then it puts the guest back by its
//! journal, and the store too. While it works no other command can take the guest:
//! its copy of the lock holds.
//!
//! **While the guest stands still** it waits no longer than it was told to. The command says
//! when the guest is about to be stopped and for how long that may be, says four times a
//! second that it is at work, and says when the guest runs again:
//!
//! ```text
//!              p LIMIT                       r, or w
//!   watching ───────────> guest stands still ────────> watching
//!                              │ silence, or LIMIT is over
//!                              v
//!                    the command is killed, the guest put back
//! ```
//!
//! So a command that is stopped, or that hangs, does not leave the guest paused. The
//! guardian itself cannot be kept stopped: a timer of the kernel lets it go on each second
//! ([`dewar_kernel::WakeTimer`]). What remains is in docs/threat-model.md: a frozen control group, a
//! debugger.
//!
//! **While the guest is slowed down** the guardian does that (`throttle.rs`), until it is told another
//! share or the command has ended; and not while the command is silent.
//!
//! If both are killed, the journal remains, and the next command that looks at
//! the guest finishes it.

mod throttle;
mod watch;
mod words;

pub use watch::watch;

use crate::failure::{Code, Failure};
use crate::helper::{Helper, HelperError};
use dewar_guest_qemu::Qmp;
use dewar_kernel::{Pid, ProcessHandle};
use dewar_registry::GuestLock;
use rustix::process::getpid;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;
use words::{ALL_WELL, BEAT, PAUSE, RESUMED, THROTTLE, test_limit};

/// How long it may take to watch.
const READY_WITHIN: Duration = Duration::from_secs(10);
const BEAT_EVERY: Duration = Duration::from_millis(250);
/// No pause is to be shorter than this before it counts as one that hangs.
const LEAST_LIMIT: Duration = Duration::from_secs(10);
/// Of how many times its target a pause may be.
const LIMIT_TIMES: u32 = 20;

/// A guardian that watches over us.
#[derive(Debug)]
pub struct Guardian {
    helper: Helper,
}

impl Guardian {
    /// Starts one for guest `name` of this root and waits until it watches. `store` is where the
    /// command writes. A container has no QMP.
    ///
    /// # Errors
    /// Where it does not start; the guest was not touched.
    pub fn start(
        root: &Path,
        name: &str,
        store: Option<&str>,
        qmp: Option<&Qmp>,
        lock: &GuestLock,
    ) -> Result<Self, Failure> {
        let start = || -> Result<Helper, HelperError> {
            let store = store.map(|url| format!("--store={url}"));
            let container = qmp.is_none().then(|| "--container".to_owned());
            let arguments = std::iter::once(name.to_owned()).chain(store).chain(container);
            let mut helper = Helper::start(root, "__guardian", arguments)?;
            if let Some(qmp) = qmp {
                helper.pass(qmp.as_fd())?;
            }
            helper.pass(lock.as_fd())?;
            let own =
                ProcessHandle::open(Pid(getpid().as_raw_pid())).map_err(std::io::Error::other)?;
            helper.pass(own.as_fd())?;
            helper.wait_ready(Some(READY_WITHIN))?;
            Ok(helper)
        };
        let helper = start().map_err(|error| {
            let what = format!("the guardian process did not start: {error}");
            Failure::new(Code::Failed, what).state("the guest was not touched")
        })?;
        Ok(Self { helper })
    }

    /// What says that the guest is about to stand still.
    ///
    /// # Errors
    /// Where the connection cannot be shared.
    pub fn pauses(&self) -> Result<Pauses, Failure> {
        let failed = |error| Failure::new(Code::Failed, format!("the guardian's socket: {error}"));
        let socket = Arc::new(Mutex::new(self.helper.socket().map_err(failed)?));
        Ok(Pauses { socket, beating: Mutex::default() })
    }

    /// Says that the guest is as it should be.
    pub fn dismiss(mut self) {
        self.helper.say(ALL_WELL);
        self.helper.wait();
    }
}

/// A command's word to its guardian of how long its guest stands still.
#[derive(Debug)]
pub struct Pauses {
    /// Words of several bytes must not mix.
    socket: Arc<Mutex<UnixStream>>,
    /// Dropped, it ends the thread that says that we are at work.
    beating: Mutex<Option<mpsc::Sender<()>>>,
}

impl Pauses {
    /// The guest is about to be stopped, and this is the pause that is wanted; without it,
    /// one as long as we are at work.
    pub fn begin(&self, wanted: Option<Duration>) {
        let limit = wanted.map_or(Duration::MAX, |wanted| LEAST_LIMIT.max(wanted * LIMIT_TIMES));
        let limit = test_limit().unwrap_or(limit);
        let mut word = vec![PAUSE];
        word.extend(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).to_le_bytes());
        self.say(&word);
        self.beat();
    }

    /// The guest runs again.
    pub fn end(&self) {
        let beating = self.beating.lock().unwrap_or_else(PoisonError::into_inner).take();
        if beating.is_some() {
            self.say(&[RESUMED]);
        }
    }

    /// The guest is slowed down from here on: these threads of a process stand still for so many hundredths of
    /// the time, as long as we say that we are at work.
    ///
    /// # Errors
    /// Where there is no guardian any more, or there are too many threads.
    pub fn throttle(&self, percent: u8, process: i32, threads: &[i32]) -> Result<(), Failure> {
        let failed = |why: String| {
            Failure::new(Code::Failed, format!("the guest cannot be slowed down: {why}"))
        };
        let word = throttle_word(percent, process, threads)
            .ok_or_else(|| failed("it has too many vCPUs".to_owned()))?;
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        socket.write_all(&word).map_err(|error| failed(format!("its guardian: {error}")))?;
        drop(socket);
        self.beat();
        Ok(())
    }

    /// It is slowed down no more. What follows this on QEMU's connection finds its vCPUs run, or about to.
    pub fn end_throttle(&self) {
        if let Some(word) = throttle_word(0, 0, &[]) {
            self.say(&word);
        }
    }

    /// Says again and again that we are at work, until the guest is as it was.
    fn beat(&self) {
        let mut beating = self.beating.lock().unwrap_or_else(PoisonError::into_inner);
        if beating.is_some() {
            return;
        }
        let (end, ended) = mpsc::channel::<()>();
        let socket = Arc::clone(&self.socket);
        // Without it the pause may only be as long as silence is.
        let _ = Builder::new().spawn(move || {
            while ended.recv_timeout(BEAT_EVERY) == Err(RecvTimeoutError::Timeout) {
                let mut socket = socket.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = socket.write_all(&[BEAT]);
            }
        });
        *beating = Some(end);
    }

    fn say(&self, word: &[u8]) {
        // A guardian that was killed needs no word.
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = socket.write_all(word);
    }
}

/// What `THROTTLE` is followed by; nothing where there are more threads than can be said.
fn throttle_word(percent: u8, process: i32, threads: &[i32]) -> Option<Vec<u8>> {
    let mut word = vec![THROTTLE, percent];
    word.extend(u16::try_from(threads.len()).ok()?.to_le_bytes());
    word.extend(process.to_le_bytes());
    word.extend(threads.iter().flat_map(|thread| thread.to_le_bytes()));
    Some(word)
}
