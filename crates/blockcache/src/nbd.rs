//! The NBD protocol, as far as QEMU speaks it (doc/proto.md of the NBD project): numbers, and requests as they come.

use std::io::{self, Read};

/// What a server says first.
pub(crate) const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
/// Before each option of a client.
pub(crate) const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// Before each answer to one.
pub(crate) const ANSWER_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Flags of both sides in the handshake.
pub(crate) const FIXED_NEWSTYLE: u16 = 1;
pub(crate) const NO_ZEROES: u16 = 2;

/// Options.
pub(crate) const EXPORT_NAME: u32 = 1;
pub(crate) const ABORT: u32 = 2;
pub(crate) const LIST: u32 = 3;
pub(crate) const INFO: u32 = 6;
pub(crate) const GO: u32 = 7;
/// One of our own, which no other server knows: the locks on all disks are to be given up.
pub(crate) const RELEASE: u32 = u32::from_be_bytes(*b"free");

/// Answers.
pub(crate) const ACK: u32 = 1;
pub(crate) const SERVER: u32 = 2;
pub(crate) const INFORMATION: u32 = 3;
pub(crate) const UNSUPPORTED: u32 = 0x8000_0001;
pub(crate) const INVALID: u32 = 0x8000_0003;
pub(crate) const UNKNOWN: u32 = 0x8000_0006;

/// Kinds of information.
pub(crate) const OF_EXPORT: u16 = 0;
pub(crate) const OF_BLOCK_SIZE: u16 = 3;

/// Flags of an export.
pub(crate) const HAS_FLAGS: u16 = 1;
pub(crate) const READ_ONLY: u16 = 1 << 1;
pub(crate) const SENDS_FLUSH: u16 = 1 << 2;
pub(crate) const SENDS_FUA: u16 = 1 << 3;
pub(crate) const SENDS_TRIM: u16 = 1 << 5;
pub(crate) const SENDS_ZEROES: u16 = 1 << 6;
pub(crate) const MANY_CONNECTIONS: u16 = 1 << 8;

const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(crate) const REPLY_MAGIC: u32 = 0x6744_6698;
/// Flags of a request: to be on the disk before it is answered; and, of zeros, to keep their place.
pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;

/// Most bytes of a read or a write: what QEMU asks for at most.
pub(crate) const MOST_BYTES: u32 = 32 << 20;

/// Error numbers of the protocol, which are Linux's.
pub(crate) const EPERM: u32 = 1;
pub(crate) const EIO: u32 = 5;
pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOSPC: u32 = 28;

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Zero,
    /// One that this server does not know.
    Other,
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) kind: Kind,
    pub(crate) flags: u16,
    /// What the client knows it by.
    pub(crate) handle: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u32,
}

/// Bytes of a request.
const REQUEST: usize = 28;

impl Request {
    /// The next request; what is written follows it.
    ///
    /// # Errors
    /// Where the connection ends, or what comes is no request.
    pub(crate) fn read(stream: &mut impl Read) -> io::Result<Self> {
        let mut bytes = [0; REQUEST];
        stream.read_exact(&mut bytes)?;
        Self::parse(&bytes).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no request"))
    }

    fn parse(bytes: &[u8; REQUEST]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (flags, rest) = rest.split_first_chunk::<2>()?;
        let (kind, rest) = rest.split_first_chunk::<2>()?;
        let (handle, rest) = rest.split_first_chunk::<8>()?;
        let (offset, rest) = rest.split_first_chunk::<8>()?;
        let (length, _) = rest.split_first_chunk::<4>()?;
        let kind = match u16::from_be_bytes(*kind) {
            0 => Kind::Read,
            1 => Kind::Write,
            2 => Kind::Disconnect,
            3 => Kind::Flush,
            4 => Kind::Trim,
            6 => Kind::Zero,
            _ => Kind::Other,
        };
        (u32::from_be_bytes(*magic) == REQUEST_MAGIC).then(|| Self {
            kind,
            flags: u16::from_be_bytes(*flags),
            handle: u64::from_be_bytes(*handle),
            offset: u64::from_be_bytes(*offset),
            bytes: u32::from_be_bytes(*length),
        })
    }
}

/// A simple reply, without what was read.
pub(crate) fn reply(handle: u64, error: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&handle.to_be_bytes());
    bytes
}
