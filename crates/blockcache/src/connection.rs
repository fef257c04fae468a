//! One client of a disk: its requests, several at a time.
//!
//! One thread reads requests, and what is written; others do them and answer, in whatever order they are done. The
//! protocol asks no more: a client that wants an order waits for the answer, and a flush covers what was answered before.

use crate::buffer::Buffer;
use crate::export::Export;
use crate::kept::Spent;
use crate::nbd::{EINVAL, EIO, ENOSPC, EPERM, FUA, Kind, MOST_BYTES, NO_HOLE, Request, reply};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, mpsc};

/// How many requests of a client are worked on at a time.
const AT_ONCE: usize = 8;

/// A request and what it writes.
type Task = (Request, Option<Buffer>);

/// Serves a client that has chosen a disk, until it goes.
///
/// # Errors
/// Where the connection breaks, or the client does not speak the protocol.
pub(crate) fn serve(mut stream: UnixStream, export: &Export) -> io::Result<()> {
    let answers = Mutex::new(stream.try_clone()?);
    // No more than are worked on wait, so that what they write takes no more memory.
    let (give, take) = mpsc::sync_channel::<Task>(AT_ONCE);
    let take = Mutex::new(take);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let task = take.lock().unwrap_or_else(|it| it.into_inner()).recv();
                    let Ok((request, bytes)) = task else { return };
                    let done = perform(export, &request, bytes);
                    if answer(&answers, &request, &done).is_err() {
                        // The reader, too, is to see that nobody listens.
                        let stream = answers.lock().unwrap_or_else(|it| it.into_inner());
                        let _ = stream.shutdown(Shutdown::Both);
                    }
                }
            });
        }
        let ended = read_requests(&mut stream, &give);
        drop(give);
        ended
    })
}

fn read_requests(stream: &mut UnixStream, give: &mpsc::SyncSender<Task>) -> io::Result<()> {
    loop {
        let request = match Request::read(stream) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            request => request?,
        };
        let bytes = match request.kind {
            Kind::Disconnect => return Ok(()),
            Kind::Write if request.bytes > MOST_BYTES => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a write is too long"));
            }
            Kind::Write => {
                let mut bytes = Buffer::new(request.bytes as usize);
                stream.read_exact(bytes.bytes_mut())?;
                Some(bytes)
            }
            _ => None,
        };
        if give.send((request, bytes)).is_err() {
            return Ok(());
        }
    }
}

/// What is answered: what was read, or the error's number.
type Done = Result<Option<(Buffer, Spent)>, u32>;

/// Does what is asked.
fn perform(export: &Export, request: &Request, bytes: Option<Buffer>) -> Done {
    let Request { kind, flags, offset, bytes: length, .. } = *request;
    let is_lasting = flags & FUA != 0;
    let length = u64::from(length);
    let disk = export.disk();
    if kind != Kind::Flush {
        let end = offset.checked_add(length).ok_or(EINVAL)?;
        let least = u64::from(disk.least());
        if offset % least != 0 || length % least != 0 || length == 0 {
            return Err(EINVAL);
        }
        if end > disk.bytes() {
            return Err(if kind == Kind::Write { ENOSPC } else { EINVAL });
        }
        if kind != Kind::Read && disk.is_read_only() {
            return Err(EPERM);
        }
    }
    let done = match (kind, bytes) {
        (Kind::Read, _) if length > u64::from(MOST_BYTES) => return Err(EINVAL),
        (Kind::Read, _) => {
            let mut into = Buffer::new(length as usize);
            let read = export.read(&mut into, offset);
            return read.map(|spent| Some((into, spent))).map_err(|it| number(&it));
        }
        (Kind::Write, Some(bytes)) => export.write(&bytes, offset, is_lasting),
        (Kind::Flush, _) => export.flush(),
        (Kind::Trim, _) => export.trim(offset, length, is_lasting),
        (Kind::Zero, _) => export.zero(offset, length, flags & NO_HOLE != 0, is_lasting),
        _ => return Err(EINVAL),
    };
    done.map(|()| None).map_err(|error| number(&error))
}

fn answer(answers: &Mutex<UnixStream>, request: &Request, done: &Done) -> io::Result<()> {
    let header = reply(request.handle, done.as_ref().err().copied().unwrap_or(0));
    let mut stream = answers.lock().unwrap_or_else(|it| it.into_inner());
    stream.write_all(&header)?;
    match done {
        Ok(Some((bytes, _))) => stream.write_all(bytes.bytes()),
        _ => Ok(()),
    }
}

/// The protocol's number of an error.
fn number(error: &io::Error) -> u32 {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ENOSPC,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => EPERM,
        _ => EIO,
    }
}
