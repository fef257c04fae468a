//! The guardian: a small process that puts the guest back if this one dies.
//!
//! It is started before the guest is touched, in a session of its own, and
//! gets copies of the QMP connection and of the guest's lock. It waits on a
//! socket. One byte says that all is well and it ends; an end of file without
//! that byte says that the command died: then it puts the guest back by its
//! journal, and the store too. While it works nobody else can take the guest:
//! its copy of the lock holds.
//!
//! If both are killed, the journal remains, and the next command that looks at
//! the guest finishes it.

use crate::apart::PARENT;
use crate::args::GuardianArgs;
use crate::context::Context;
use crate::failure::{Code, Failure};
use dewar_guest_qemu::registry::GuestLock;
use dewar_guest_qemu::{Qmp, receive_fd, recover, send_fd};
use dewar_image::{Location, Store};
use dewar_kernel::detach;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How often it tries to put the guest back, a second or more apart.
const TRIES: u32 = 120;
const READY_WITHIN: Duration = Duration::from_secs(10);
const ALL_WELL: u8 = b'w';
const READY: u8 = b'r';

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
            ours.set_read_timeout(Some(READY_WITHIN))?;
            ours.read_exact(&mut [0])?;
            Ok(Self { socket: ours, process })
        };
        start().map_err(|error| {
            let what = format!("the guardian process did not start: {error}");
            Failure::new(Code::Failed, what).state("the guest was not touched")
        })
    }

    /// Says that the guest is as it should be.
    pub fn dismiss(mut self) {
        // A guardian that was killed needs no word.
        let _ = self.socket.write_all(&[ALL_WELL]);
        let _ = self.process.wait();
    }
}

/// The guardian's own life.
pub fn watch(context: &Context, args: GuardianArgs) -> Result<(), Failure> {
    let broken = |error: std::io::Error| Failure::new(Code::Failed, format!("guardian: {error}"));
    let stdin = std::io::stdin();
    let mut socket = UnixStream::from(stdin.as_fd().try_clone_to_owned().map_err(broken)?);
    let qmp = receive_fd(&socket).map_err(broken)?;
    let lock = GuestLock::inherit(receive_fd(&socket).map_err(broken)?);
    socket.write_all(&[READY]).map_err(broken)?;
    let mut word = [0];
    if socket.read(&mut word).is_ok_and(|count| count == 1) && word[0] == ALL_WELL {
        return Ok(());
    }
    let folder = context.registry.guest(&args.name)?;
    let record = folder.record()?;
    let mut inherited = Some(qmp);
    let mut result = Ok(());
    for _ in 0..TRIES {
        let connect = || match inherited.take() {
            Some(fd) => Ok(Qmp::take_over(fd)),
            None => record.connect(),
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
