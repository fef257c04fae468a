//! The loop of a disk server: it accepts clients and starts a thread for each.

use crate::connection;
use crate::export::Export;
use crate::handshake::handshake;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

/// How long it is waited where the system has no room for one more client.
const AGAIN: Duration = Duration::from_millis(50);
/// How long a client may take to say which disk it wants.
const CHOOSES_WITHIN: Duration = Duration::from_secs(10);

/// Serves disks, by their names, to all that connect, for as long as this process lives.
///
/// Several may be connected at a time, and each sees what the others have written: of an export there is one.
pub fn serve(listener: &UnixListener, exports: &[(String, Arc<Export>)]) -> ! {
    loop {
        let begun = listener.accept().and_then(|(stream, _)| {
            let exports = exports.to_vec();
            // A client that breaks off, or speaks otherwise, is its own loss: its connection ends.
            let serve = move || drop(serve_one(stream, &exports));
            std::thread::Builder::new().spawn(serve)
        });
        if begun.is_err() {
            // Too many open files, say. It asks again.
            std::thread::sleep(AGAIN);
        }
    }
}

fn serve_one(mut stream: UnixStream, exports: &[(String, Arc<Export>)]) -> io::Result<()> {
    stream.set_read_timeout(Some(CHOOSES_WITHIN))?;
    let Some(export) = handshake(&mut stream, exports)? else { return Ok(()) };
    stream.set_read_timeout(None)?;
    connection::serve(stream, &export)
}
