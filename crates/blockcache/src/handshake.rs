//! The first words of a client: which disk it wants.

use crate::export::Export;
use crate::nbd::{
    ABORT, ACK, ANSWER_MAGIC, EXPORT_NAME, FIXED_NEWSTYLE, GO, GREETING, HAS_FLAGS, INFO,
    INFORMATION, INVALID, LIST, MANY_CONNECTIONS, MOST_BYTES, NO_ZEROES, OF_BLOCK_SIZE, OF_EXPORT,
    OPTION_MAGIC, READ_ONLY, RELEASE, SENDS_FLUSH, SENDS_FUA, SENDS_TRIM, SENDS_ZEROES, SERVER,
    UNKNOWN, UNSUPPORTED,
};
use dewar_units::PAGE_BYTES;
use std::io::{self, Read, Write};
use std::sync::Arc;

/// Most bytes of an option: a name, and which information is wanted.
const MOST_OPTION: u32 = 8 << 10;
/// Most options before a disk is chosen.
const MOST_OPTIONS: u32 = 64;

/// A disk and its name.
pub(crate) type Named = (String, Arc<Export>);

/// Greets a client and returns the disk that it wants; nothing where it goes without one.
///
/// # Errors
/// Where the connection ends, or the client does not speak the protocol.
pub(crate) fn handshake(
    stream: &mut (impl Read + Write),
    exports: &[Named],
) -> io::Result<Option<Arc<Export>>> {
    let mut greeting = GREETING.to_vec();
    greeting.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    stream.write_all(&greeting)?;
    let flags = u32_of(stream)?;
    for _ in 0..MOST_OPTIONS {
        if u64_of(stream)? != OPTION_MAGIC {
            return Err(bad("no option"));
        }
        let (option, length) = (u32_of(stream)?, u32_of(stream)?);
        if length > MOST_OPTION {
            return Err(bad("an option is too long"));
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        match option {
            EXPORT_NAME => {
                // This one can only be refused by ending the connection.
                let Some(export) = named(exports, &data) else { return Ok(None) };
                let mut answer = export.disk().bytes().to_be_bytes().to_vec();
                answer.extend(flags_of(&export).to_be_bytes());
                if flags & u32::from(NO_ZEROES) == 0 {
                    answer.extend([0; 124]);
                }
                stream.write_all(&answer)?;
                return Ok(Some(export));
            }
            INFO | GO => match wanted(&data) {
                None => answer(stream, option, INVALID, &[])?,
                Some(name) => match named(exports, name) {
                    None => answer(stream, option, UNKNOWN, &[])?,
                    Some(export) => {
                        tell_of(stream, option, &export)?;
                        if option == GO {
                            return Ok(Some(export));
                        }
                    }
                },
            },
            LIST => {
                for (name, _) in exports {
                    let mut data = (name.len() as u32).to_be_bytes().to_vec();
                    data.extend(name.as_bytes());
                    answer(stream, option, SERVER, &data)?;
                }
                answer(stream, option, ACK, &[])?;
            }
            RELEASE => {
                exports.iter().for_each(|(_, export)| export.leave_to_others());
                answer(stream, option, ACK, &[])?;
            }
            ABORT => {
                answer(stream, option, ACK, &[])?;
                return Ok(None);
            }
            _ => answer(stream, option, UNSUPPORTED, &[])?,
        }
    }
    Err(bad("too many options"))
}

/// The name in what `GO` or `INFO` brings: its length, itself, and which information is wanted.
fn wanted(data: &[u8]) -> Option<&[u8]> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    rest.get(..u32::from_be_bytes(*length) as usize)
}

fn named(exports: &[Named], name: &[u8]) -> Option<Arc<Export>> {
    exports.iter().find(|(it, _)| it.as_bytes() == name).map(|(_, export)| export.clone())
}

fn flags_of(export: &Export) -> u16 {
    let writes = SENDS_FLUSH | SENDS_FUA | SENDS_TRIM | SENDS_ZEROES;
    let how = if export.disk().is_read_only() { READ_ONLY | SENDS_FLUSH } else { writes };
    HAS_FLAGS | MANY_CONNECTIONS | how
}

fn tell_of(stream: &mut impl Write, option: u32, export: &Export) -> io::Result<()> {
    let disk = export.disk();
    let mut of_export = OF_EXPORT.to_be_bytes().to_vec();
    of_export.extend(disk.bytes().to_be_bytes());
    of_export.extend(flags_of(export).to_be_bytes());
    answer(stream, option, INFORMATION, &of_export)?;
    let mut sizes = OF_BLOCK_SIZE.to_be_bytes().to_vec();
    for bytes in [disk.least(), PAGE_BYTES as u32, MOST_BYTES] {
        sizes.extend(bytes.to_be_bytes());
    }
    answer(stream, option, INFORMATION, &sizes)?;
    answer(stream, option, ACK, &[])
}

fn answer(stream: &mut impl Write, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let mut bytes = ANSWER_MAGIC.to_be_bytes().to_vec();
    for number in [option, kind, data.len() as u32] {
        bytes.extend(number.to_be_bytes());
    }
    bytes.extend(data);
    stream.write_all(&bytes)
}

fn u32_of(stream: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

fn u64_of(stream: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}

fn bad(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
