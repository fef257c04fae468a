//! A process of ours beside a command: the guardian, the page server, the supervisor and the server of
//! served disks, the watcher of `host-reboot`, the watchdog and the background controller of `qos`. A
//! command that another one runs to its end is no helper.
//!
//! The command starts its own program again, in a session of its own, with one end of a unix socket as
//! standard input:
//!
//! ```text
//!  command                                helper
//!     | -- descriptors, messages -------->  |   Helper::pass, send, say
//!     | <-------- ready, or why not ------  |   Parent::ready, fail
//!     | -- words --------------------->     |   whatever the two agree on
//!     X                                     |   end of file: the command has ended
//! ```
//!
//! The helper lives on when the command ends, and sees that by the end of the file; what it does then
//! is its own. If the helper dies, the command sees it where it next waits for an answer; what it says
//! into the void is lost, and it need not care.

use crate::own_session::PARENT;
use dewar_guest_qemu::{receive_fd, send_fd};
use dewar_kernel::detach;
use dewar_registry::ProcessId;
use rustix::net::SendFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Tells a program that its standard input is the socket of a [`Parent`].
const IS_HELPER: &str = "DEWAR_HELPER";
const READY: u8 = b'r';
const FAILED: u8 = b'f';
/// How long a helper may take to read what it is sent.
const READ_WITHIN: Duration = Duration::from_secs(2);
/// No message between the two is longer.
const MESSAGE_MAX: u32 = 16 << 20;

/// Where a helper's standard output and standard error go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Nowhere.
    Null,
    /// To the command.
    Piped,
}

/// Why a helper does not help.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HelperError {
    /// It said so.
    #[error("{0}")]
    Failed(String),
    /// It ended, or does not answer.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A process of ours, as the command sees it. Dropped, it is left to itself.
#[derive(Debug)]
pub struct Helper {
    socket: UnixStream,
    process: Child,
    /// Whether a message did not go whole.
    is_cut_off: bool,
}

impl Helper {
    /// Starts `dewar --root ROOT VERB …`.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start(
        root: &Path,
        verb: &str,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--root").arg(root).arg(verb).args(arguments);
        Self::spawn(command, Output::Null)
    }

    /// Starts this command's own program with these arguments and no others.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start_again(
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
        output: Output,
    ) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments);
        Self::spawn(command, output)
    }

    fn spawn(mut command: Command, output: Output) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let output = || match output {
            Output::Null => Stdio::null(),
            Output::Piped => Stdio::piped(),
        };
        command
            .env_remove(PARENT)
            .env(IS_HELPER, "1")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(output())
            .stderr(output());
        let process = detach(&mut command).spawn()?;
        // With the command goes our copy of the helper's end: its death must be seen.
        drop(command);
        socket.set_write_timeout(Some(READ_WITHIN))?;
        Ok(Self { socket, process, is_cut_off: false })
    }

    /// Passes it a descriptor.
    ///
    /// # Errors
    /// Where it has ended.
    pub fn pass(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        send_fd(&self.socket, fd).map_err(io::Error::other)
    }

    /// Sends it a message.
    ///
    /// # Errors
    /// Where it has ended, or has not read for a while: it hears nothing more then.
    pub fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.send_after(&[], message)
    }

    /// Sends it a message that a word announces.
    ///
    /// # Errors
    /// As [`Helper::send`].
    pub fn send_as(&mut self, word: u8, message: &impl Serialize) -> io::Result<()> {
        self.send_after(&[word], message)
    }

    fn send_after(&mut self, word: &[u8], message: &impl Serialize) -> io::Result<()> {
        if self.is_cut_off {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let text = serde_json::to_vec(message)?;
        let length = u32::try_from(text.len()).map_err(io::Error::other)?.to_le_bytes();
        let sent = self.socket.write_all(&[word, &length, &text].concat());
        // Half a message may have gone: what comes next would be taken for its rest.
        self.is_cut_off = sent.is_err();
        sent
    }

    /// Says a word to it, and does not wait: a helper that was killed needs no word, and one that was
    /// stopped (SIGSTOP) has heard enough.
    pub fn say(&mut self, word: u8) {
        if !self.is_cut_off {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let _ = rustix::net::send(&self.socket, &[word], flags);
        }
    }

    /// Waits until it is ready.
    ///
    /// # Errors
    /// Where it is not: [`HelperError::Failed`] where it said why.
    pub fn wait_ready(&mut self, within: Option<Duration>) -> Result<(), HelperError> {
        self.socket.set_read_timeout(within)?;
        let mut word = [0];
        self.socket.read_exact(&mut word).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                HelperError::Failed("it ended before it was ready".to_owned())
            }
            _ => HelperError::Io(error),
        })?;
        if word[0] == READY {
            return Ok(());
        }
        Err(HelperError::Failed(receive(&mut self.socket)?))
    }

    /// Another handle of the socket, for words of its own.
    ///
    /// # Errors
    /// Where there are too many open files.
    pub fn socket(&self) -> io::Result<UnixStream> {
        self.socket.try_clone()
    }

    /// The process.
    pub fn process(&mut self) -> &mut Child {
        &mut self.process
    }

    /// Its identity on this host; where it has ended, one that no process has.
    pub fn id(&self) -> ProcessId {
        let pid = self.process.id() as i32;
        ProcessId::of(pid).unwrap_or(ProcessId { pid, started: 0, boot: 0 })
    }

    /// Waits until it has ended.
    pub fn wait(mut self) {
        let _ = self.process.wait();
    }
}

/// The command that started this process, as the process sees it.
#[derive(Debug)]
pub struct Parent {
    socket: UnixStream,
}

impl Parent {
    /// The command that waits for this process to be ready.
    ///
    /// # Errors
    /// Where it cannot be reached.
    pub fn of_this_process() -> io::Result<Self> {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        Ok(Self { socket: UnixStream::from(socket) })
    }

    /// The same; nothing where this process was started by a person.
    pub fn if_any() -> Option<Self> {
        std::env::var_os(IS_HELPER).and_then(|_| Self::of_this_process().ok())
    }

    /// Receives a descriptor.
    ///
    /// # Errors
    /// Where the command has ended.
    pub fn receive_fd(&self) -> io::Result<OwnedFd> {
        receive_fd(&self.socket)
    }

    /// Receives a message; nothing where the command has ended.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Option<T> {
        receive(&mut self.socket).ok()
    }

    /// Says that this process is ready.
    ///
    /// # Errors
    /// Where the command has ended.
    pub fn ready(&mut self) -> io::Result<()> {
        self.socket.write_all(&[READY])
    }

    /// Says why it never will be.
    pub fn fail(&mut self, why: &str) {
        let text = serde_json::to_vec(why).unwrap_or_default();
        let length = (text.len() as u32).to_le_bytes();
        // The command may have ended.
        let _ = self.socket.write_all(&[&[FAILED][..], &length, &text].concat());
    }

    /// The socket, for words.
    pub fn socket(&mut self) -> &mut UnixStream {
        &mut self.socket
    }
}

fn receive<T: DeserializeOwned>(socket: &mut UnixStream) -> io::Result<T> {
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MESSAGE_MAX {
        return Err(io::Error::other("a message is too long"));
    }
    let mut text = vec![0; length as usize];
    socket.read_exact(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// A helper that reads nothing, as one that was stopped; and its end of the socket.
    fn stopped() -> (Helper, UnixStream) {
        let (socket, theirs) = UnixStream::pair().expect("a pair");
        socket.set_write_timeout(Some(Duration::from_millis(200))).expect("a timeout");
        let process = Command::new("true").spawn().expect("a process");
        (Helper { socket, process, is_cut_off: false }, theirs)
    }

    #[test]
    fn a_helper_that_reads_nothing_keeps_no_command_waiting() {
        let (mut helper, _theirs) = stopped();
        let began = Instant::now();
        (0..5000).for_each(|_| helper.say(b'a'));
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        assert!(helper.send_as(b'e', &"x".repeat(1 << 20)).is_err());
        let began = Instant::now();
        assert!(helper.send(&1).is_err(), "half a message may have gone");
        assert!(began.elapsed() < Duration::from_millis(100));
        helper.wait();
    }

    #[test]
    fn a_helper_that_ends_early_is_not_ready() {
        let (mut helper, theirs) = stopped();
        drop(theirs);
        let why = helper.wait_ready(None).expect_err("it has ended").to_string();
        assert!(why.contains("ended before it was ready"), "{why}");
        helper.wait();
    }

    #[test]
    fn why_it_is_not_ready_is_told() {
        let (mut helper, theirs) = stopped();
        Parent { socket: theirs }.fail("no such image");
        let why = helper.wait_ready(None).expect_err("it said so").to_string();
        assert_eq!(why, "no such image");
        helper.wait();
    }
}
