//! A disk's connection: the bytes that two QEMUs say to each other over NBD, as frames both ways.

use crate::frames::{FrameReader, FrameWriter};
use dewar_wire::frame::Kind;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

/// Bytes in a frame: few, so that messages in the same stream wait for little.
const FRAME_BYTES: usize = 64 << 10;

/// Carries bytes between a QEMU and the other host, until either says no more; on two threads.
pub fn carry_disk(
    socket: UnixStream,
    from: FrameReader<impl Read + Send + 'static>,
    to: FrameWriter<impl Write + Send + 'static>,
) -> std::io::Result<()> {
    let there = socket.try_clone()?;
    std::thread::spawn(move || carry_there(there, to));
    std::thread::spawn(move || carry_here(from, &socket));
    Ok(())
}

/// A QEMU that ends its connection is told of by a frame without bytes.
fn carry_there(mut socket: UnixStream, mut to: FrameWriter<impl Write>) {
    let mut bytes = vec![0; FRAME_BYTES];
    loop {
        let read = socket.read(&mut bytes).unwrap_or(0);
        if to.send(Kind::Disk, &bytes[..read]).is_err() {
            return cut_disk(&socket);
        }
        if read == 0 {
            return;
        }
    }
}

fn carry_here(mut from: FrameReader<impl Read>, mut socket: &UnixStream) {
    while let Ok(Some((Kind::Disk, bytes))) = from.receive() {
        if bytes.is_empty() || socket.write_all(bytes).is_err() {
            break;
        }
    }
    cut_disk(socket);
}

/// Ends a QEMU's connection. What it had sent is read to the end: while it lies there, QEMU waits to send
/// more, and does not see that the connection is gone.
pub fn cut_disk(mut socket: &UnixStream) {
    let _ = socket.shutdown(Shutdown::Both);
    let _ = io::copy(&mut socket, &mut io::sink());
}
