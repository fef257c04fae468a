//! A restore that waits for a word: CRIU brings a container back to the last step before it runs, and stays there.
//!
//! CRIU tells the runtime of each step, by messages on a socket (CRIU's `images/rpc.proto`), and goes on when the
//! runtime has answered. In the runtime's `PATH` there is nothing but a link `criu` to our own program. It starts
//! a relay between the two and becomes CRIU:
//!
//! ```text
//!  runtime  <---- messages ---->  relay  <---- messages ---->  CRIU
//!                                   |  "post-restore": all is restored, nothing runs, the network is closed
//!                                   |  is kept back, and a socket is there
//!                 go, or nothing -> |  passed on: the container runs; or both connections end
//! ```
//!
//! **Nothing runs by accident.** If the relay ends, or the runtime, CRIU hears no answer to "post-restore": it kills
//! what it has restored. If CRIU is killed its processes wait for it for ever, and end with the container.
//!
//! The relay belongs to no command: the next command that finds the socket in the folder can say the word.
//!
//! **Files by number.** The first request names folders by the numbers that they have in the process at the other end of
//! CRIU's socket, the runtime. Here that is the process that becomes CRIU: it opens them, and writes its own numbers
//! into the request ([`request`](crate::request)).

use crate::folder::{held_process, held_socket, unwanted};
use crate::request::with_other_files;
use crate::stand_in::{STAND_IN, become_runtime};
use dewar_kernel::{detach, inherited, peer_of};
use dewar_registry::ProcessId;
use prost::Message;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, sendmsg, socketpair,
};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// The name by which a runtime starts CRIU.
const CRIU: &str = "criu";
/// The name by which this program starts itself as the relay.
const RELAY: &str = "criu-relay";
/// The word for a relay that is to be nobody's child.
const ORPHAN: &str = "orphan";
/// CRIU's own word for one that is spoken to on a descriptor that it inherits.
const ON_SOCKET: &str = "swrk";
/// The variables with the path of CRIU, the `PATH` that it is to have, and the folder of the restore.
const PROGRAM: &str = "DEWAR_CRIU";
const PATH: &str = "DEWAR_CRIU_PATH";
const FOLDER: &str = "DEWAR_CRIU_FOLDER";
/// The step that is kept back.
const LAST_STEP: &str = "post-restore";
/// The word that lets it go on.
pub const GO: &[u8] = b"go\n";
/// Descriptors that come with a message, at most.
const MOST_FILES: usize = 8;

/// Part of what CRIU says (`criu_resp`).
#[derive(Clone, PartialEq, Message)]
struct Said {
    #[prost(message, optional, tag = "5")]
    step: Option<Step>,
}

/// A step that CRIU has come to (`criu_notify`).
#[derive(Clone, PartialEq, Message)]
struct Step {
    #[prost(string, optional, tag = "1")]
    script: Option<String>,
    /// The container's first process.
    #[prost(int32, optional, tag = "2")]
    pid: Option<i32>,
}

/// Has the runtime that this command starts find us in place of CRIU.
///
/// # Errors
/// Where the link cannot be made.
pub fn put_before_criu(command: &mut Command, criu: &Path, folder: &Path) -> io::Result<()> {
    let programs = folder.join("bin");
    fs::create_dir_all(&programs)?;
    // By our own process: what is installed may be replaced at any time, and a link that leads nowhere would have the
    // runtime find CRIU itself, which would not wait.
    let link = programs.join(CRIU);
    std::os::unix::fs::symlink(format!("/proc/{}/exe", std::process::id()), &link)?;
    if !fs::metadata(&link)?.is_file() {
        return Err(io::Error::other("our own program cannot be found"));
    }
    // No other CRIU may be found there: it would not wait.
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env("PATH", programs).env(PATH, path).env(PROGRAM, criu).env(FOLDER, folder);
    Ok(())
}

/// Does what is to be done where this program was started in another's place: as CRIU by a runtime, as the runtime by
/// podman, or as the relay by us. `None` in all other cases. To be called before all else.
pub fn run_if_started_as_another() -> Option<ExitCode> {
    let mut words = std::env::args_os();
    let name = PathBuf::from(words.next()?);
    let words: Vec<OsString> = words.collect();
    let result = match name.file_name()?.to_str()? {
        CRIU => Err(become_criu(&words)),
        STAND_IN => Err(become_runtime(&name, &words)),
        RELAY if words.first().is_some_and(|it| it == ORPHAN) => start_relay(&[]),
        RELAY => relay(),
        _ => return None,
    };
    Some(match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", name.display());
            ExitCode::FAILURE
        }
    })
}

/// Starts the relay and becomes CRIU. The runtime has put this process into the container's control groups, or is
/// about to, and knows it by its number.
fn become_criu(words: &[OsString]) -> io::Error {
    let Some(program) = std::env::var_os(PROGRAM) else {
        return io::Error::other(format!("{PROGRAM} is not set"));
    };
    let mut command = Command::new(program);
    command.env("PATH", std::env::var_os(PATH).unwrap_or_default());
    let begun = match words {
        [verb, number] if verb == ON_SOCKET => connect(number).map(Some),
        _ => Ok(None),
    };
    match begun {
        Ok(Some(socket)) => {
            command.arg(ON_SOCKET).arg(socket.as_raw_fd().to_string());
            // Kept until there is nothing of us any more.
            std::mem::forget(socket);
        }
        Ok(None) => drop(command.args(words)),
        Err(error) => return error,
    }
    command.exec()
}

/// Takes the first request from the socket with this number, and starts a relay for what follows. Returns CRIU's end.
fn connect(number: &OsStr) -> io::Result<OwnedFd> {
    let number = number.to_str().and_then(|it| it.parse().ok());
    let runtime = UnixStream::from(inherited(number.ok_or(io::ErrorKind::InvalidInput)?)?);
    let peer = peer_of(&runtime).map_err(io::Error::other)?.ok_or(io::ErrorKind::NotFound)?;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // The runtime has put this process where it belongs before it asks.
    let mut first = receive(runtime.as_fd())?.ok_or(io::ErrorKind::UnexpectedEof)?;
    first.bytes = with_other_files(&first.bytes, &mut |number| {
        let file = File::open(format!("/proc/{}/fd/{number}", peer.0))?;
        fcntl_setfd(&file, FdFlags::empty())?;
        Ok(file.into_raw_fd())
    })?;
    first.send(ours.as_fd())?;
    let mut command = relay_command(&[ORPHAN]);
    let status =
        command.stdin(Stdio::from(OwnedFd::from(runtime))).stdout(Stdio::from(ours)).status()?;
    if !status.success() {
        return Err(io::Error::other("the relay did not start"));
    }
    fcntl_setfd(&theirs, FdFlags::empty())?;
    Ok(theirs)
}

/// Starts the relay in a process that is no child of CRIU's, which counts those.
fn start_relay(words: &[&str]) -> io::Result<()> {
    detach(&mut relay_command(words)).spawn().map(drop)
}

fn relay_command(words: &[&str]) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(RELAY).args(words).stderr(Stdio::null());
    command
}

/// Passes messages on between the runtime, on standard input, and CRIU, on standard output, until either ends.
fn relay() -> io::Result<()> {
    let folder = PathBuf::from(std::env::var_os(FOLDER).ok_or(io::ErrorKind::NotFound)?);
    let (runtime, criu) = (rustix::stdio::stdin(), rustix::stdio::stdout());
    loop {
        let ready = wait(&[runtime, criu])?;
        if ready[1] {
            let Some(message) = receive(criu)? else { return Ok(()) };
            if let Some(pid) = last_step(&message.bytes) {
                if !wait_for_word(&folder, pid, runtime, criu)? {
                    return Ok(());
                }
            }
            message.send(runtime)?;
        }
        if ready[0] {
            match receive(runtime)? {
                Some(message) => message.send(criu)?,
                None => return Ok(()),
            }
        }
    }
}

/// The container's first process, where this is the last step.
fn last_step(message: &[u8]) -> Option<i32> {
    let step = Said::decode(message).ok()?.step?;
    step.pid.filter(|_| step.script.as_deref() == Some(LAST_STEP))
}

/// Waits until somebody says that the container is to run; says whether it is.
fn wait_for_word(
    folder: &Path,
    pid: i32,
    runtime: BorrowedFd<'_>,
    criu: BorrowedFd<'_>,
) -> io::Result<bool> {
    let process = ProcessId::of(pid).ok_or(io::ErrorKind::NotFound)?;
    fs::write(held_process(folder), serde_json::to_vec(&process)?)?;
    let path = held_socket(folder);
    let listener = UnixListener::bind(&path)?;
    // Last: who finds no socket writes this, and who finds one need not.
    if unwanted(folder).exists() {
        return Ok(false);
    }
    loop {
        let ready = wait(&[runtime, criu, listener.as_fd()])?;
        if ready[0] || ready[1] {
            // Neither says anything now but that it has ended.
            return Ok(false);
        }
        let (client, _) = listener.accept()?;
        match hear(&client, runtime, criu)? {
            Word::Go => {
                // Its other end sees by the end of the connection that all is done: ours is closed with us.
                std::mem::forget(client);
                fs::remove_file(&path)?;
                return Ok(true);
            }
            Word::End => return Ok(false),
            Word::Nothing => {}
        }
    }
}

/// What a command says of a restore that waits.
enum Word {
    Go,
    End,
    /// It has ended.
    Nothing,
}

fn hear(
    mut client: &UnixStream,
    runtime: BorrowedFd<'_>,
    criu: BorrowedFd<'_>,
) -> io::Result<Word> {
    let ready = wait(&[runtime, criu, client.as_fd()])?;
    if ready[0] || ready[1] {
        return Ok(Word::End);
    }
    let mut word = [0; 16];
    Ok(match client.read(&mut word) {
        Ok(count) if word[..count] == *GO => Word::Go,
        Ok(0) | Err(_) => Word::Nothing,
        Ok(_) => Word::End,
    })
}

/// Waits until one of these can be read or has ended; says which.
fn wait(files: &[BorrowedFd<'_>]) -> io::Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> =
        files.iter().map(|file| PollFd::from_borrowed_fd(*file, PollFlags::IN)).collect();
    loop {
        match poll(&mut polled, None) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(polled.iter().map(|it| !it.revents().is_empty()).collect()),
        }
    }
}

/// A message, with the descriptors that came with it.
struct Passed {
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
}

/// The next message; `None` where the other end is gone.
fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Passed>> {
    // Its length first: what does not fit would be lost.
    let look = RecvFlags::PEEK | RecvFlags::TRUNC;
    let (_, length) = match recv(socket, &mut [0u8; 0][..], look) {
        Err(Errno::CONNRESET) => return Ok(None),
        looked => looked?,
    };
    let mut bytes = vec![0; length];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)?;
    let files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let files: Vec<OwnedFd> = files.flatten().collect();
    Ok((got.bytes > 0).then(|| {
        bytes.truncate(got.bytes);
        Passed { bytes, files }
    }))
}

impl Passed {
    fn send(&self, to: BorrowedFd<'_>) -> io::Result<()> {
        let files: Vec<BorrowedFd<'_>> = self.files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(io::Error::other("too many descriptors in a message"));
        }
        let bytes = [IoSlice::new(&self.bytes)];
        sendmsg(to, &bytes, &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .expect("pair")
    }

    #[test]
    fn the_last_step_is_told_from_others() {
        let said = |script: &str| {
            let step = Step { script: Some(script.to_owned()), pid: Some(7) };
            // A type and a success, as CRIU sends them, before the step.
            let mut bytes = vec![0x08, 7, 0x10, 1];
            bytes.extend(Said { step: Some(step) }.encode_to_vec());
            last_step(&bytes)
        };
        assert_eq!(said("post-restore"), Some(7));
        assert_eq!(said("pre-restore"), None);
        assert_eq!(last_step(&[0x08, 2, 0x10, 1]), None);
        assert_eq!(last_step(b"\xff\xff\xff"), None);
    }

    #[test]
    fn a_message_is_passed_on_with_its_descriptors() {
        let (one, other) = pair();
        let (kept, sent) = pair();
        let bytes = vec![7; 100_000];
        Passed { bytes: bytes.clone(), files: vec![sent] }.send(one.as_fd()).expect("sent");
        let got = receive(other.as_fd()).expect("received").expect("a message");
        assert_eq!(got.bytes, bytes);
        Passed { bytes: b"x".to_vec(), files: Vec::new() }
            .send(got.files[0].as_fd())
            .expect("sent");
        let through = receive(kept.as_fd()).expect("received").expect("a message");
        assert_eq!((through.bytes, through.files.len()), (b"x".to_vec(), 0));
        drop(one);
        assert!(receive(other.as_fd()).expect("the end").is_none());
    }
}
