use crate::ImageError;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// What tells a segment from another with its number: one of a copy of the store that went
/// its own way, say. Random; all zeros in segments of version 1, which have none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SegmentId([u8; 16]);

impl SegmentId {
    /// That of segments which have none.
    pub(crate) const NONE: Self = Self([0; 16]);

    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        bytes.try_into().map_or(Self::NONE, Self)
    }

    pub(crate) fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    pub(crate) fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

impl std::fmt::Display for SegmentId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl std::fmt::Debug for SegmentId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl From<SegmentId> for String {
    fn from(id: SegmentId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for SegmentId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let number = u128::from_str_radix(&text, 16).ok().filter(|_| text.len() == 32);
        number.map(|it| Self(it.to_be_bytes())).ok_or("a segment's id is 32 hexadecimal digits")
    }
}

/// Gives out ids that nothing else has.
#[derive(Debug)]
pub(crate) struct SegmentIds([u8; 32]);

impl SegmentIds {
    pub(crate) fn new() -> Result<Self, ImageError> {
        let (mut seed, random) = ([0; 32], Path::new("/dev/urandom"));
        File::open(random)
            .and_then(|mut file| file.read_exact(&mut seed))
            .map_err(ImageError::io("read", random))?;
        Ok(Self(seed))
    }

    pub(crate) fn of(&self, number: u64) -> SegmentId {
        let hash = blake3::keyed_hash(&self.0, &number.to_le_bytes());
        SegmentId::from_bytes(&hash.as_bytes()[..16])
    }
}
