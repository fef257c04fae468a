//! Several connections of a migration inside one stream: what is left where nothing but the standard
//! input and output of a program leads to the other host.
//!
//! Each frame says which connection it belongs to. So frames of all of them follow each other in the
//! stream, whole, in any order; those of one keep theirs.

use dewar_wire::control::{CONTROL, FIRST_DISK};
use dewar_wire::frame::{HEADER_BYTES, Header};
use std::io::{self, ErrorKind, Read, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

/// Frames that wait to be read from one connection.
const WAITING: usize = 4;
/// The same for a disk's: more than QEMU has under way at a time (16 MiB), so that a slow disk is in no
/// message's way.
const WAITING_OF_DISK: usize = 1024;

/// The sending end of one connection in a stream. What is written goes out when it is flushed, at once:
/// write a whole frame, then flush.
#[derive(Debug)]
pub struct TunnelWriter<W> {
    stream: Arc<Mutex<W>>,
    frame: Vec<u8>,
}

impl<W: Write> TunnelWriter<W> {
    /// The first end in a stream.
    pub fn new(stream: W) -> Self {
        Self { stream: Arc::new(Mutex::new(stream)), frame: Vec::new() }
    }

    /// Another end in the same stream.
    #[must_use]
    pub fn another(&self) -> Self {
        Self { stream: Arc::clone(&self.stream), frame: Vec::new() }
    }
}

impl<W: Write> Write for TunnelWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.frame.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(&self.frame)?;
        self.frame.clear();
        stream.flush()
    }
}

/// The receiving end of one connection in a stream.
#[derive(Debug)]
pub struct TunnelReader {
    frames: Receiver<io::Result<Vec<u8>>>,
    frame: Vec<u8>,
    read: usize,
}

impl Read for TunnelReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.read == self.frame.len() {
            // The stream has ended.
            let Ok(frame) = self.frames.recv() else { return Ok(0) };
            (self.frame, self.read) = (frame?, 0);
        }
        let count = into.len().min(self.frame.len() - self.read);
        into[..count].copy_from_slice(&self.frame[self.read..self.read + count]);
        self.read += count;
        Ok(count)
    }
}

/// Takes a stream apart, on a thread of its own. The answer has an end for each of `shards`; frames of
/// others are an error on all of them.
pub fn take_apart<R: Read + Send + 'static>(stream: R, shards: &[u16]) -> Vec<TunnelReader> {
    let (senders, readers): (Vec<_>, Vec<_>) = shards
        .iter()
        .map(|shard| {
            let is_disk = (FIRST_DISK..CONTROL).contains(shard);
            let (sender, frames) = sync_channel(if is_disk { WAITING_OF_DISK } else { WAITING });
            ((*shard, sender), TunnelReader { frames, frame: Vec::new(), read: 0 })
        })
        .unzip();
    std::thread::spawn(move || {
        if let Err(error) = pass_on(stream, &senders) {
            for (_, sender) in &senders {
                let _ = sender.send(Err(io::Error::new(error.kind(), error.to_string())));
            }
        }
    });
    readers
}

fn pass_on(
    mut stream: impl Read,
    senders: &[(u16, SyncSender<io::Result<Vec<u8>>>)],
) -> io::Result<()> {
    let invalid = |why: String| io::Error::new(ErrorKind::InvalidData, why);
    loop {
        let mut header = [0; HEADER_BYTES];
        let first = loop {
            match stream.read(&mut header) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        if first == 0 {
            return Ok(());
        }
        stream.read_exact(&mut header[first..])?;
        let parsed = Header::parse_any(&header).map_err(|error| invalid(error.to_string()))?;
        let shard = parsed.place.shard;
        let (_, sender) = senders.iter().find(|(it, _)| *it == shard).ok_or_else(|| {
            invalid(format!("a frame of an unknown connection, {shard}, arrived"))
        })?;
        let mut frame = header.to_vec();
        frame.resize(HEADER_BYTES + parsed.length as usize, 0);
        stream.read_exact(&mut frame[HEADER_BYTES..])?;
        // One that nobody reads any more is in no other's way.
        let _ = sender.send(Ok(frame));
    }
}
