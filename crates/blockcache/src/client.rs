//! What other processes of ours ask of a disk server, at the socket where it serves.

use crate::nbd::{ACK, ANSWER_MAGIC, FIXED_NEWSTYLE, GREETING, NO_ZEROES, OPTION_MAGIC, RELEASE};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long the server may take to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// Has the server behind a socket give up the locks on its disks. It takes them again where a disk is written.
///
/// # Errors
/// Where it does not answer, or is none of ours.
pub fn release_locks(socket: &Path) -> io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
    let mut greeting = [0; GREETING.len() + 2];
    stream.read_exact(&mut greeting)?;
    let mut words = u32::from(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes().to_vec();
    words.extend(OPTION_MAGIC.to_be_bytes());
    words.extend(RELEASE.to_be_bytes());
    words.extend(0_u32.to_be_bytes());
    stream.write_all(&words)?;
    let mut answer = [0; 20];
    stream.read_exact(&mut answer)?;
    let mut wanted = ANSWER_MAGIC.to_be_bytes().to_vec();
    for number in [RELEASE, ACK, 0] {
        wanted.extend(number.to_be_bytes());
    }
    match greeting.starts_with(GREETING) && answer[..] == wanted {
        true => Ok(()),
        false => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "the server does not know of locks"))
        }
    }
}
