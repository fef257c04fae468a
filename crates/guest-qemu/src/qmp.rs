//! QMP, QEMU's control protocol: one JSON object a line, file descriptors
//! beside them (docs/interop/qmp-spec in QEMU's sources).
//!
//! QEMU reads commands a byte at a time (`monitor_can_read` in its monitor/monitor.c), and
//! goes once around its event loop for each. So nothing is said that need not be.

use crate::qmp_events::Events;
use dewar_kernel::peer_of;
use dewar_registry::{GuestRecord, ProcessId};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, sendmsg, socket_with,
};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long QEMU may take to answer a command.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// How long it may take to greet us: one client is served at a time.
const GREET_WITHIN: Duration = Duration::from_secs(5);

/// So many commands are sent at once at most: they, and their answers, fit into a socket.
const AT_ONCE: usize = 64;

/// What can go wrong between QEMU and us.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// QEMU closed the connection; as a rule, it ended.
    #[error("QEMU closed its QMP connection")]
    Closed,
    /// No answer came.
    #[error("QEMU did not answer '{command}' within {} s", within.as_secs())]
    Silent {
        /// To what.
        command: String,
        /// In how long.
        within: Duration,
    },
    /// It answers, but it is another than was meant.
    #[error("another process ({0}) answers on its QMP socket")]
    Stranger(i32),
    /// It is of a PID namespace outside this one.
    #[error("the process that answers on its QMP socket cannot be seen from this PID namespace")]
    Unseen,
    /// Another program holds the QMP socket.
    #[error(
        "QEMU does not greet on its QMP socket: another program is connected to it, or it is not \
         that far yet"
    )]
    Busy,
    /// QEMU refused a command.
    #[error("QEMU refuses '{command}': {reason}")]
    Refused {
        /// Which.
        command: String,
        /// In its words.
        reason: String,
    },
    /// The socket failed.
    #[error("QMP socket: {0}")]
    Socket(#[from] io::Error),
}

/// A connection to a QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    received: Vec<u8>,
    next_id: u64,
    events: Events,
    /// Kinds of devices that have no option ROM: that does not change.
    without_rom: HashSet<String>,
}

impl Qmp {
    /// Connects and leaves negotiation mode.
    ///
    /// # Errors
    /// Where nobody listens, or somebody else is connected.
    pub fn connect(path: &Path) -> Result<Self, QmpError> {
        Self::over(stream_to(path, GREET_WITHIN)?).greeted(GREET_WITHIN)
    }

    /// The same with this very process, and with no other that took its socket's name.
    ///
    /// # Errors
    /// As [`Qmp::connect`], and [`QmpError::Stranger`].
    pub fn connect_to(path: &Path, process: &ProcessId) -> Result<Self, QmpError> {
        Self::connect_to_within(path, process, GREET_WITHIN)
    }

    /// Connects to a guest's QEMU, and to no other.
    ///
    /// # Errors
    /// As [`Qmp::connect_to`].
    pub fn of(guest: &GuestRecord) -> Result<Self, QmpError> {
        Self::connect_to(&guest.qmp, &guest.process)
    }

    /// The same of a process that must greet us within this time.
    ///
    /// # Errors
    /// As [`Qmp::connect_to`].
    pub fn connect_to_within(
        path: &Path,
        process: &ProcessId,
        within: Duration,
    ) -> Result<Self, QmpError> {
        if !process.is_alive() {
            return Err(QmpError::Closed);
        }
        let qmp = Self::over(stream_to(path, within)?);
        match qmp.peer_pid()? {
            pid if pid == process.pid => qmp.greeted(within),
            pid => Err(QmpError::Stranger(pid)),
        }
    }

    /// Asks QEMU to end, and waits no longer than this for its answer.
    ///
    /// # Errors
    /// Where it does not answer.
    pub fn quit(&mut self, within: Duration) -> Result<(), QmpError> {
        self.execute_within(within, "quit", json!({})).map(drop)
    }

    /// The threads that run the guest's vCPUs, each once: TCG may run all of them in one.
    ///
    /// # Errors
    /// Where QEMU does not answer.
    pub fn vcpu_threads(&mut self) -> Result<Vec<i32>, QmpError> {
        let report = self.execute("query-cpus-fast", json!({}))?;
        let thread = |cpu: &Value| cpu["thread-id"].as_i64();
        let threads = report.as_array().into_iter().flatten().filter_map(thread);
        let mut threads: Vec<i32> = threads.map(|thread| thread as i32).collect();
        threads.sort_unstable();
        threads.dedup();
        Ok(threads)
    }

    fn greeted(mut self, within: Duration) -> Result<Self, QmpError> {
        let deadline = Instant::now() + within;
        loop {
            match self.message(deadline) {
                Ok(Some(greeting)) if greeting.get("QMP").is_some() => break,
                // What was still to be said to the client that was connected before.
                Ok(Some(rest)) if rest.get("event").is_some() || rest.get("return").is_some() => {}
                Ok(Some(other)) => {
                    return Err(io::Error::other(format!("not a QMP greeting: {other}")).into());
                }
                Ok(None) => return Err(QmpError::Busy),
                Err(error) => return Err(error),
            }
        }
        self.execute_within(within.max(GREET_WITHIN), "qmp_capabilities", json!({}))?;
        Ok(self)
    }

    /// Takes over a connection whose user died; what it left unread, perhaps
    /// from the middle of a line, is skipped.
    pub fn take_over(fd: OwnedFd) -> Self {
        let mut qmp = Self::over(UnixStream::from(fd));
        // Ids of the dead user must not be taken for ours.
        qmp.next_id = 1 << 32;
        qmp
    }

    fn over(stream: UnixStream) -> Self {
        let (received, events, without_rom) = (Vec::new(), Events::default(), HashSet::new());
        Self { stream, received, next_id: 1, events, without_rom }
    }

    /// The number of the process at the other end, as it was when it began to
    /// listen.
    ///
    /// # Errors
    /// Where it has none here, or the kernel does not tell.
    pub fn peer_pid(&self) -> Result<i32, QmpError> {
        let peer = peer_of(&self.stream).map_err(|error| QmpError::Socket(error.cause))?;
        peer.map(|pid| pid.0).ok_or(QmpError::Unseen)
    }

    /// Runs a command and returns what it returns.
    ///
    /// # Errors
    /// Where QEMU refuses, is gone, or does not answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.run(command, arguments, None, ANSWER_WITHIN)
    }

    /// The same of a QEMU that must answer sooner.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub(crate) fn execute_within(
        &mut self,
        within: Duration,
        command: &str,
        arguments: Value,
    ) -> Result<Value, QmpError> {
        self.run(command, arguments, None, within)
    }

    /// Runs one command with many arguments: all are sent before the first answer is read,
    /// so that neither side waits for the other each time.
    ///
    /// # Errors
    /// Where QEMU is gone or does not answer; what it refuses is nothing.
    pub(crate) fn execute_all(
        &mut self,
        command: &str,
        arguments: impl IntoIterator<Item = Value>,
    ) -> Result<Vec<Value>, QmpError> {
        let arguments: Vec<Value> = arguments.into_iter().collect();
        let mut answers = Vec::with_capacity(arguments.len());
        for some in arguments.chunks(AT_ONCE) {
            let lines: Vec<(u64, String)> =
                some.iter().map(|arguments| self.line(command, arguments.clone())).collect();
            let all: String = lines.iter().map(|(_, line)| line.as_str()).collect();
            self.send(all.as_bytes(), None)?;
            for (id, _) in lines {
                answers.push(match self.answer(id, command, ANSWER_WITHIN) {
                    Err(QmpError::Refused { .. }) => Value::Null,
                    answer => answer?,
                });
            }
        }
        Ok(answers)
    }

    /// Whether the vCPUs were let run since we connected, by all that QEMU has
    /// said until now, also if it is gone. It says so before it lets them
    /// (`vm_prepare_start` in QEMU's system/cpus.c).
    pub fn has_resumed(&mut self) -> bool {
        self.resumes_within(Duration::from_micros(100))
    }

    /// The same, waiting for it for as long as QEMU says something else at least so often.
    pub(crate) fn resumes_within(&mut self, time: Duration) -> bool {
        while self.events.resumes == 0 {
            match self.message(Instant::now() + time) {
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => break,
            }
        }
        self.events.resumes > 0
    }

    /// Whether the guest powered itself off, by all that QEMU has said until now, also if it is
    /// gone.
    pub(crate) fn has_shut_down(&mut self) -> bool {
        while let Ok(Some(_)) = self.message(Instant::now() + Duration::from_micros(100)) {}
        self.events.shut_down
    }

    /// Waits until QEMU has reset the guest, since we connected.
    ///
    /// # Errors
    /// Where it is gone.
    pub fn is_reset_within(&mut self, time: Duration) -> Result<bool, QmpError> {
        let deadline = Instant::now() + time;
        while self.events.resets == 0 && self.message(deadline)?.is_some() {}
        Ok(self.events.resets > 0)
    }

    /// Waits until QEMU says that it ends the guest's run, and why (`ShutdownCause` in its qapi/run-state.json).
    ///
    /// # Errors
    /// Where it is gone.
    pub(crate) fn shutdown_within(&mut self, time: Duration) -> Result<Option<String>, QmpError> {
        let deadline = Instant::now() + time;
        while self.events.shutdown_reason.is_none() {
            if self.message(deadline)?.is_none() {
                break;
            }
        }
        Ok(self.events.shutdown_reason.take())
    }

    /// How often the vCPUs were let run since we connected, by what QEMU had said when it
    /// last answered us.
    pub(crate) fn resumes(&self) -> u64 {
        self.events.resumes
    }

    /// Whether it is known that devices of a kind have no option ROM.
    pub(crate) fn has_no_rom(&self, kind: &str) -> bool {
        self.without_rom.contains(kind)
    }

    /// Notes that they have none.
    pub(crate) fn note_no_rom(&mut self, kind: &str) {
        self.without_rom.insert(kind.to_owned());
    }

    /// Runs a command that takes a file descriptor.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn execute_with_fd(
        &mut self,
        command: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        self.run(command, arguments, Some(fd), ANSWER_WITHIN)
    }

    fn run(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        within: Duration,
    ) -> Result<Value, QmpError> {
        let (id, line) = self.line(command, arguments);
        self.send(line.as_bytes(), fd)?;
        self.answer(id, command, within)
    }

    /// A command as it is sent, and its number.
    fn line(&mut self, command: &str, arguments: Value) -> (u64, String) {
        let id = self.next_id;
        self.next_id += 1;
        let mut line = json!({"execute": command, "id": id});
        if arguments.as_object().is_none_or(|it| !it.is_empty()) {
            line["arguments"] = arguments;
        }
        (id, format!("{line}\n"))
    }

    fn answer(&mut self, id: u64, command: &str, within: Duration) -> Result<Value, QmpError> {
        let deadline = Instant::now() + within;
        loop {
            let Some(mut message) = self.message(deadline)? else {
                let command = command.to_owned();
                return Err(QmpError::Silent { command, within });
            };
            if message["id"] != id {
                // An event, or an answer to a dead user's command.
                continue;
            }
            if let Some(error) = message.get("error") {
                let reason = error["desc"].as_str().unwrap_or("no reason given").to_owned();
                return Err(QmpError::Refused { command: command.to_owned(), reason });
            }
            return Ok(message["return"].take());
        }
    }

    fn send(&mut self, mut bytes: &[u8], mut fd: Option<BorrowedFd<'_>>) -> Result<(), QmpError> {
        while !bytes.is_empty() {
            let sent = send_with_fd(self.stream.as_fd(), bytes, fd.take())?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// The next message, or `None` at the deadline. Lines that are not JSON
    /// are the torn rest of a dead user's.
    fn message(&mut self, deadline: Instant) -> Result<Option<Value>, QmpError> {
        loop {
            while let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                if let Ok(message) = serde_json::from_slice::<Value>(&line) {
                    self.events.note(&message);
                    return Ok(Some(message));
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut buffer = [0; 16 << 10];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(QmpError::Closed),
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => return Ok(None),
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::ConnectionReset => return Err(QmpError::Closed),
                    _ => return Err(error.into()),
                },
            }
        }
    }
}

/// Connects, for no longer than a greeting may take: QEMU lets one client wait beside the
/// one that it serves, and connect(2) waits for room for as long as it is let.
fn stream_to(path: &Path, within: Duration) -> Result<UnixStream, QmpError> {
    let kernels = |error: Errno| QmpError::Socket(error.into());
    let flags = SocketFlags::CLOEXEC;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(kernels)?;
    set_socket_timeout(&socket, Timeout::Send, Some(within)).map_err(kernels)?;
    let address = SocketAddrUnix::new(path).map_err(kernels)?;
    match connect(&socket, &address) {
        Ok(()) => {}
        Err(Errno::AGAIN) => return Err(QmpError::Busy),
        Err(error) => return Err(kernels(error)),
    }
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_WITHIN)).map_err(kernels)?;
    Ok(UnixStream::from(socket))
}

impl AsFd for Qmp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Sends bytes over a unix socket, with a descriptor beside them. Returns how
/// many bytes went.
pub(crate) fn send_with_fd(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<usize, QmpError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).map_err(|error| {
        match error {
            rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => QmpError::Closed,
            error => QmpError::Socket(error.into()),
        }
    })
}

/// Runs a command of the monitor for people.
pub(crate) fn monitor(qmp: &mut Qmp, line: &str) -> Result<String, QmpError> {
    let said = qmp.execute("human-monitor-command", json!({"command-line": line}))?;
    Ok(said.as_str().unwrap_or_default().to_owned())
}
