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
//! ([`WakeTimer`]). What remains is in docs/threat-model.md: a frozen control group, a
//! debugger.
//!
//! If both are killed, the journal remains, and the next command that looks at
//! the guest finishes it.

use crate::args::GuardianArgs;
use crate::context::Context;
use crate::failure::{Code, Failure};
use crate::own_session::PARENT;
use dewar_guest_qemu::{Qmp, receive_fd, recover, send_fd};
use dewar_image::{Location, Store};
use dewar_kernel::{Pid, ProcessHandle, WakeTimer, detach};
use dewar_registry::GuestLock;
use rustix::process::getpid;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How often it tries to put the guest back, a second or more apart.
const TRIES: u32 = 120;
const READY_WITHIN: Duration = Duration::from_secs(10);
const ALL_WELL: u8 = b'w';
const READY: u8 = b'r';
/// What is said of a pause: that it begins, with its limit in milliseconds; that somebody is
/// at work; that it is over.
const PAUSE: u8 = b'p';
const BEAT: u8 = b'b';
const RESUMED: u8 = b'r';
const BEAT_EVERY: Duration = Duration::from_millis(250);
/// A command that has said nothing for so long, while its guest stands still, does nothing.
const SILENT_FOR: Duration = Duration::from_secs(3);
/// No pause is to be shorter than this before it counts as one that hangs.
const LEAST_LIMIT: Duration = Duration::from_secs(10);
/// Of how many times its target a pause may be.
const LIMIT_TIMES: u32 = 20;
/// How often the kernel lets a stopped guardian go on.
const WAKE_EVERY: Duration = Duration::from_secs(1);
/// How long a killed command may take to be gone.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
/// For tests that hold a command in the pause: the limit of a pause, and of silence.
const TEST_LIMIT: &str = "DEWAR_TEST_PAUSE_LIMIT";

/// A guardian that watches over us.
pub struct Guardian {
    socket: UnixStream,
    process: Child,
}

impl Guardian {
    /// Starts one for guest `name` and waits until it watches.
    pub fn start(
        context: &Context,
        name: &str,
        store: Option<&str>,
        qmp: &Qmp,
        lock: &GuestLock,
    ) -> Result<Self, Failure> {
        let start = || -> Result<Self, Box<dyn std::error::Error>> {
            let (mut ours, theirs) = UnixStream::pair()?;
            let mut command = Command::new(std::env::current_exe()?);
            command
                .arg("--root")
                .arg(context.registry.root())
                .args(["__guardian", name])
                .args(store.map(|url| format!("--store={url}")))
                .env_remove(PARENT)
                .stdin(Stdio::from(OwnedFd::from(theirs)))
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            let process = detach(&mut command).spawn()?;
            drop(command);
            send_fd(&ours, qmp.as_fd())?;
            send_fd(&ours, lock.as_fd())?;
            let own = ProcessHandle::open(Pid(getpid().as_raw_pid()))?;
            send_fd(&ours, own.as_fd())?;
            ours.set_read_timeout(Some(READY_WITHIN))?;
            ours.read_exact(&mut [0])?;
            Ok(Self { socket: ours, process })
        };
        start().map_err(|error| {
            let what = format!("the guardian process did not start: {error}");
            Failure::new(Code::Failed, what).state("the guest was not touched")
        })
    }

    /// What says that the guest is about to stand still.
    ///
    /// # Errors
    /// Where the connection cannot be shared.
    pub fn pauses(&self) -> Result<Pauses, Failure> {
        let failed = |error| Failure::new(Code::Failed, format!("the guardian's socket: {error}"));
        Ok(Pauses { socket: self.socket.try_clone().map_err(failed)?, beating: Mutex::default() })
    }

    /// Says that the guest is as it should be.
    pub fn dismiss(mut self) {
        // A guardian that was killed needs no word.
        let _ = self.socket.write_all(&[ALL_WELL]);
        let _ = self.process.wait();
    }
}

/// A command's word to its guardian of how long its guest stands still.
pub struct Pauses {
    socket: UnixStream,
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
        let (end, ended) = mpsc::channel::<()>();
        let Ok(mut socket) = self.socket.try_clone() else { return };
        // Without it the pause may only be as long as silence is.
        let _ = Builder::new().spawn(move || {
            while ended.recv_timeout(BEAT_EVERY) == Err(RecvTimeoutError::Timeout) {
                let _ = socket.write_all(&[BEAT]);
            }
        });
        *self.beating.lock().unwrap_or_else(|locked| locked.into_inner()) = Some(end);
    }

    /// The guest runs again.
    pub fn end(&self) {
        let beating = self.beating.lock().unwrap_or_else(|locked| locked.into_inner()).take();
        if beating.is_some() {
            self.say(&[RESUMED]);
        }
    }

    fn say(&self, word: &[u8]) {
        // A guardian that was killed needs no word.
        let _ = (&self.socket).write_all(word);
    }
}

fn test_limit() -> Option<Duration> {
    std::env::var(TEST_LIMIT).ok()?.parse().ok().map(Duration::from_secs)
}

/// How a command ended that was watched.
#[derive(PartialEq, Eq)]
enum End {
    /// All is as it should be.
    Well,
    /// It died.
    Died,
    /// It lets its guest stand still.
    Hangs,
}

/// Waits for a command's end, or for a pause that is too long.
fn wait_for_end(socket: &mut UnixStream) -> End {
    let silent_for = test_limit().unwrap_or(SILENT_FOR);
    let mut pause: Option<(Instant, u64)> = None;
    let mut heard = Instant::now();
    loop {
        // Our own timer interrupts us: what is left is counted from the last word.
        let left = pause.map(|(since, limit)| {
            let left = Duration::from_millis(limit).saturating_sub(since.elapsed());
            left.min(silent_for.saturating_sub(heard.elapsed()))
        });
        if left.is_some_and(|left| left.is_zero()) {
            return End::Hangs;
        }
        if socket.set_read_timeout(left).is_err() {
            return End::Died;
        }
        let mut word = [0];
        match socket.read(&mut word) {
            Ok(0) => return End::Died,
            Ok(_) => heard = Instant::now(),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(_) => return End::Died,
        }
        match word[0] {
            ALL_WELL => return End::Well,
            PAUSE => {
                let mut limit = [0; 8];
                let told = socket.read_exact(&mut limit);
                // Of one that died in the middle of a word it is heard next.
                pause = told.ok().map(|()| (Instant::now(), u64::from_le_bytes(limit)));
            }
            RESUMED => pause = None,
            _ => {}
        }
    }
}

/// The guardian's own life.
pub fn watch(context: &Context, args: GuardianArgs) -> Result<(), Failure> {
    let broken = |error: std::io::Error| Failure::new(Code::Failed, format!("guardian: {error}"));
    let stdin = std::io::stdin();
    let mut socket = UnixStream::from(stdin.as_fd().try_clone_to_owned().map_err(broken)?);
    let qmp = receive_fd(&socket).map_err(broken)?;
    let lock = GuestLock::inherit(receive_fd(&socket).map_err(broken)?);
    let command = ProcessHandle::from_pidfd(receive_fd(&socket).map_err(broken)?);
    // Without it a guardian that is stopped waits until it is let go on.
    let _awake = WakeTimer::every(WAKE_EVERY);
    socket.write_all(&[READY]).map_err(broken)?;
    match wait_for_end(&mut socket) {
        End::Well => return Ok(()),
        End::Died => {}
        End::Hangs => {
            // It must not go on while the guest is put back.
            let _ = command.kill();
            command.ends_within(ENDS_WITHIN);
        }
    }
    let folder = context.registry.guest(&args.name)?;
    let record = folder.record()?;
    let mut inherited = Some(qmp);
    let mut result = Ok(());
    for _ in 0..TRIES {
        let connect = || match inherited.take() {
            Some(fd) => Ok(Qmp::take_over(fd)),
            None => Qmp::of(&record),
        };
        result = recover(connect, &folder, &record);
        if result.is_ok() {
            break;
        }
        // A QEMU that hangs with its disk may come back.
        std::thread::sleep(Duration::from_secs(1));
    }
    // The dead command's half image goes too; whatever stays, the next writer
    // removes.
    let store = args.store.map(|url| Location::parse(&url).and_then(|it| Store::open(&it)));
    if let Some(Ok(store)) = store {
        let _ = store.sweep();
    }
    drop(lock);
    Ok(result?)
}
