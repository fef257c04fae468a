//! The first frame of each connection: which versions of the protocol a side speaks, and what it can.
//!
//! The frame's form is the same in all versions. Both sides send theirs at once and come to the same
//! agreement: the highest version that both speak, and the features that both have.

use std::fmt;

/// The version that this code speaks.
pub const VERSION: u16 = 1;
/// The bytes of a hello.
pub const HELLO_BYTES: usize = 12;

/// Things that a side can, beyond what every side can.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Features(u64);

impl Features {
    /// Frames of pages by LZ4.
    pub const LZ4: Self = Self(1);
    /// Frames of pages by Zstandard.
    pub const ZSTD: Self = Self(1 << 1);
    /// Guests that run before all of their memory has arrived.
    pub const POST_COPY: Self = Self(1 << 2);

    /// Pages as words that differ, and as the same as another page.
    pub const REFERENCES: Self = Self(1 << 3);

    const NAMES: [(Self, &'static str); 4] = [
        (Self::LZ4, "lz4"),
        (Self::ZSTD, "zstd"),
        (Self::POST_COPY, "post-copy"),
        (Self::REFERENCES, "references"),
    ];

    /// None.
    pub const fn none() -> Self {
        Self(0)
    }

    /// Those of either.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Those of both.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether all of these are among them.
    pub const fn has(self, these: Self) -> bool {
        self.0 & these.0 == these.0
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Self::NAMES.iter().filter(|(feature, _)| self.has(*feature));
        f.debug_set().entries(known.map(|(_, name)| name)).finish()
    }
}

/// Why two sides cannot work together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelloError {
    /// The payload is no hello.
    #[error("what arrived is not a greeting")]
    NoHello,
    /// There is no version that both speak.
    #[error(
        "this side speaks versions {ours_first} to {ours_last} of the migration protocol, the other \
         {theirs_first} to {theirs_last}: give both hosts the same version of dewar"
    )]
    NoVersion {
        /// The first that this side speaks.
        ours_first: u16,
        /// The last.
        ours_last: u16,
        /// The first that the other side speaks.
        theirs_first: u16,
        /// The last.
        theirs_last: u16,
    },
}

/// What a side says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The first version that it speaks.
    pub first: u16,
    /// The last.
    pub last: u16,
    /// What it can.
    pub features: Features,
}

/// What two sides agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreement {
    /// The version.
    pub version: u16,
    /// What both can.
    pub features: Features,
}

impl Hello {
    /// This code's, with those features.
    pub fn ours(features: Features) -> Self {
        Self { first: VERSION, last: VERSION, features }
    }

    /// Its bytes.
    pub fn bytes(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..2].copy_from_slice(&self.first.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.last.to_le_bytes());
        bytes[4..].copy_from_slice(&self.features.0.to_le_bytes());
        bytes
    }

    /// The hello that these bytes are. Later versions may say more after them.
    ///
    /// # Errors
    /// Where they are none.
    pub fn parse(bytes: &[u8]) -> Result<Self, HelloError> {
        let (Some([a, b, c, d]), Some(features)) = (bytes.first_chunk(), bytes.get(4..HELLO_BYTES))
        else {
            return Err(HelloError::NoHello);
        };
        let (first, last) = (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
        let features = features.try_into().map_err(|_| HelloError::NoHello)?;
        if first > last {
            return Err(HelloError::NoHello);
        }
        Ok(Self { first, last, features: Features(u64::from_le_bytes(features)) })
    }

    /// What this side and the other agree on; the other comes to the same.
    ///
    /// # Errors
    /// Where no version is spoken by both.
    pub fn agree(&self, theirs: &Self) -> Result<Agreement, HelloError> {
        let version = self.last.min(theirs.last);
        if version < self.first.max(theirs.first) {
            return Err(HelloError::NoVersion {
                ours_first: self.first,
                ours_last: self.last,
                theirs_first: theirs.first,
                theirs_last: theirs.last,
            });
        }
        Ok(Agreement { version, features: self.features.intersection(theirs.features) })
    }
}
