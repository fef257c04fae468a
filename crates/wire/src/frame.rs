//! Frames: what both directions of every connection are made of.
//!
//! A frame knows its place: which migration, which connection (*shard*) of it, which side sent it, and its
//! number there.
//! A checksum covers all of it. So a frame that was damaged, repeated, lost, sent back or put into another
//! connection is found before a byte of it is used. TLS, below, is what keeps a stranger out; this finds mistakes.
//!
//! The length is checked before memory is set aside: the other side is a stranger until it knows better.

use std::fmt;
use twox_hash::XxHash3_64;

/// The bytes of a [`Header`].
pub const HEADER_BYTES: usize = 40;
/// "DWRF", as a little-endian number.
const MAGIC: u32 = u32::from_le_bytes(*b"DWRF");

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Versions and features ([`crate::hello`]).
    Hello = 1,
    /// A message of the control connection, in JSON.
    Control = 2,
    /// Pages.
    Pages = 3,
    /// Device state.
    State = 4,
    /// All frames of an epoch were sent on this connection.
    Barrier = 5,
    /// The side that sends it is at work.
    Beat = 6,
    /// Bytes of a disk's connection, NBD; none: that end says no more.
    Disk = 7,
}

impl Kind {
    const ALL: [Self; 7] = [
        Self::Hello,
        Self::Control,
        Self::Pages,
        Self::State,
        Self::Barrier,
        Self::Beat,
        Self::Disk,
    ];

    /// The most bytes that its payload may have.
    pub fn most_bytes(self) -> u32 {
        match self {
            Self::Hello => 64,
            Self::Barrier => 16,
            Self::Beat => 0,
            Self::Control => 4 << 20,
            Self::Disk => 64 << 10,
            Self::Pages | Self::State => 2 << 20,
        }
    }

    fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// Why a frame is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// What follows is no frame.
    #[error("what arrived is not a frame of a migration")]
    NoFrame,
    /// A connection begins with something else.
    #[error("a connection of a migration does not begin with a greeting")]
    NoGreeting,
    /// A kind that this version does not know.
    #[error("a frame of unknown kind {0} arrived")]
    UnknownKind(u8),
    /// Longer than its kind may be.
    #[error("a frame of {length} bytes arrived, of which {most} are allowed")]
    TooLong {
        /// What its header says.
        length: u32,
        /// What is allowed.
        most: u32,
    },
    /// It belongs elsewhere.
    #[error("a frame arrived out of place: {found} where {wanted} was due")]
    OutOfPlace {
        /// Where it belongs.
        found: Place,
        /// Where it arrived.
        wanted: Place,
    },
    /// It was damaged on its way.
    #[error("a damaged frame arrived at {0}")]
    Damaged(Place),
}

/// Who sends a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Side {
    /// The host that the guest leaves.
    Source = 0,
    /// The host that it comes to.
    Destination = 1,
}

/// Where a frame belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Which migration.
    pub session: u64,
    /// Which of its connections.
    pub shard: u16,
    /// Who sends it.
    pub from: Side,
    /// Its number on that connection, from that side, from 0.
    pub sequence: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { session, shard, from, sequence } = self;
        let from = match from {
            Side::Source => "source",
            Side::Destination => "destination",
        };
        write!(f, "the {from}'s frame {sequence} on connection {shard} of migration {session:016x}")
    }
}

impl Place {
    /// The first of a connection.
    pub fn first(session: u64, shard: u16, from: Side) -> Self {
        Self { session, shard, from, sequence: 0 }
    }

    /// The one after it.
    #[must_use]
    pub fn next(self) -> Self {
        Self { sequence: self.sequence + 1, ..self }
    }
}

/// What comes before a frame's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the payload is.
    pub kind: Kind,
    /// Where the frame belongs.
    pub place: Place,
    /// The payload's bytes.
    pub length: u32,
    checksum: u64,
}

impl Header {
    /// The header of a payload.
    ///
    /// # Panics
    /// Where the payload is longer than its kind may be.
    pub fn of(kind: Kind, place: Place, payload: &[u8]) -> Self {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        assert!(length <= kind.most_bytes(), "{length} bytes of {kind:?}");
        let unchecked = Self { kind, place, length, checksum: 0 };
        Self { checksum: unchecked.sum(payload), ..unchecked }
    }

    /// Its bytes.
    pub fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[5] = self.place.from as u8;
        bytes[6..8].copy_from_slice(&self.place.shard.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.place.session.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.place.sequence.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.length.to_le_bytes());
        bytes[32..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// The header that these bytes are, of the frame that is due. Its checksum waits for the payload
    /// ([`Header::check`]); the length is at most [`Kind::most_bytes`].
    ///
    /// # Errors
    /// Where they are none, or of another frame.
    pub fn parse(bytes: &[u8; HEADER_BYTES], wanted: Place) -> Result<Self, FrameError> {
        let header = Self::parse_any(bytes)?;
        match header.place == wanted {
            true => Ok(header),
            false => Err(FrameError::OutOfPlace { found: header.place, wanted }),
        }
    }

    /// The header of the first frame of a connection of which it is not known yet which it is: a
    /// greeting from that side.
    ///
    /// # Errors
    /// Where the bytes are none.
    pub fn parse_first(bytes: &[u8; HEADER_BYTES], from: Side) -> Result<Self, FrameError> {
        let header = Self::parse_any(bytes)?;
        let wanted = Place::first(header.place.session, header.place.shard, from);
        match header.kind == Kind::Hello && header.place == wanted {
            true => Ok(header),
            false => Err(FrameError::NoGreeting),
        }
    }

    /// The header that these bytes are, wherever the frame belongs: for what only passes frames on.
    ///
    /// # Errors
    /// Where they are none.
    pub fn parse_any(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let number = |from: usize, count: usize| {
            let mut wide = [0; 8];
            wide[..count].copy_from_slice(&bytes[from..from + count]);
            u64::from_le_bytes(wide)
        };
        let from = match bytes[5] {
            0 => Side::Source,
            1 => Side::Destination,
            _ => return Err(FrameError::NoFrame),
        };
        if number(0, 4) != u64::from(MAGIC) || number(28, 4) != 0 {
            return Err(FrameError::NoFrame);
        }
        let kind = Kind::of(bytes[4]).ok_or(FrameError::UnknownKind(bytes[4]))?;
        let (length, most) = (number(24, 4) as u32, kind.most_bytes());
        if length > most {
            return Err(FrameError::TooLong { length, most });
        }
        let (session, shard) = (number(8, 8), number(6, 2) as u16);
        let place = Place { session, shard, from, sequence: number(16, 8) };
        Ok(Self { kind, place, length, checksum: number(32, 8) })
    }

    /// Whether the payload is the one that the header was made of.
    ///
    /// # Errors
    /// Where either was damaged.
    pub fn check(&self, payload: &[u8]) -> Result<(), FrameError> {
        match self.sum(payload) == self.checksum && payload.len() == self.length as usize {
            true => Ok(()),
            false => Err(FrameError::Damaged(self.place)),
        }
    }

    /// XXH3-64 of the payload, seeded with that of the header without its checksum.
    fn sum(&self, payload: &[u8]) -> u64 {
        let header = Self { checksum: 0, ..*self }.bytes();
        XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(&header), payload)
    }
}
