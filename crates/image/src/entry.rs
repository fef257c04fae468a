use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use std::fmt;

const KIND_BITS: u32 = 3;
const INDEX_BITS: u32 = 6;
const FRAME_BITS: u32 = 16;
const KIND_PACKED: u64 = 1;
const KIND_KEYED: u64 = 2;
const SOURCE_BITS: u32 = 22;
/// The highest number of a source.
pub(crate) const LAST_SOURCE: u32 = (1 << SOURCE_BITS) - 1;
/// The bits of a seal.
pub(crate) const SEAL_MASK: u64 = (1 << 39) - 1;

/// Where a page lies: its segment, the frame in the segment, the page in the
/// frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageAddress {
    /// The segment's number in its store; below 2^39.
    pub segment: u64,
    /// The frame in the segment.
    pub frame: u16,
    /// The page in the frame; below 64.
    pub index: u8,
}

impl fmt::Display for PageAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {:016x} frame {} page {}", self.segment, self.frame, self.index)
    }
}

/// A page that lies in a dirty store, under its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyedAddress {
    /// Which of the record's sources holds it; below 2^22.
    pub source: u32,
    /// The beginning of its value's checksum, below 2^39: a value that is put
    /// over another has another seal, so an older one is known.
    pub seal: u64,
}

/// Where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// Nowhere: it is zeros.
    Zeros,
    /// In a frame of a segment.
    Packed(PageAddress),
    /// By itself, in a dirty store.
    Keyed(KeyedAddress),
}

/// One 64-bit entry of the page table.
///
/// Bits 0-2 tell the kind: 0, a page of zeros (all other bits are 0 too);
/// 1, *packed*: bits 3-8 the page in the frame, 9-24 the frame, 25-63 the
/// segment; 2, *keyed*: bits 3-24 the source, 25-63 the seal. Others mean a newer
/// version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Entry(pub u64);

impl Entry {
    /// A page of zeros, or a node whose pages are all zeros.
    pub const ZERO: Self = Self(0);
    /// Not decided yet; never written.
    pub(crate) const UNSET: Self = Self(u64::MAX);
    /// Not decided yet, and no longer the bulk pass's to decide; never written.
    pub(crate) const CLAIMED: Self = Self(u64::MAX - 1);

    /// The entry of a page that lies in a frame.
    pub fn packed(at: PageAddress) -> Self {
        debug_assert!(at.segment < 1 << 39 && at.index < 1 << INDEX_BITS);
        Self(
            KIND_PACKED
                | (u64::from(at.index) << KIND_BITS)
                | (u64::from(at.frame) << (KIND_BITS + INDEX_BITS))
                | (at.segment << (KIND_BITS + INDEX_BITS + FRAME_BITS)),
        )
    }

    /// The entry of a page that lies in a dirty store.
    pub fn keyed(at: KeyedAddress) -> Self {
        debug_assert!(at.source <= LAST_SOURCE && at.seal <= SEAL_MASK);
        let source = u64::from(at.source) << KIND_BITS;
        Self(KIND_KEYED | source | (at.seal << (KIND_BITS + SOURCE_BITS)))
    }

    /// Where the page is.
    ///
    /// # Errors
    /// Gives the entry back where its kind is unknown.
    pub fn place(self) -> Result<Place, Self> {
        match self.0 & ((1 << KIND_BITS) - 1) {
            0 if self.0 == 0 => Ok(Place::Zeros),
            KIND_PACKED => Ok(Place::Packed(PageAddress {
                segment: self.0 >> (KIND_BITS + INDEX_BITS + FRAME_BITS),
                frame: (self.0 >> (KIND_BITS + INDEX_BITS)) as u16,
                index: (self.0 >> KIND_BITS) as u8 & ((1 << INDEX_BITS) - 1),
            })),
            KIND_KEYED => Ok(Place::Keyed(KeyedAddress {
                source: (self.0 >> KIND_BITS) as u32 & LAST_SOURCE,
                seal: self.0 >> (KIND_BITS + SOURCE_BITS),
            })),
            _ => Err(self),
        }
    }

    /// The address of a packed page.
    pub(crate) fn packed_at(self) -> Option<PageAddress> {
        match self.place() {
            Ok(Place::Packed(at)) => Some(at),
            _ => None,
        }
    }
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{:x}", self.0))
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map(Self).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn addresses_come_back(segment in 0u64..1 << 39, frame: u16, index in 0u8..64) {
            let at = PageAddress { segment, frame, index };
            prop_assert_eq!(Entry::packed(at).place(), Ok(Place::Packed(at)));
        }

        #[test]
        fn keys_come_back(source in 0..=LAST_SOURCE, seal in 0..=SEAL_MASK) {
            let at = KeyedAddress { source, seal };
            prop_assert_eq!(Entry::keyed(at).place(), Ok(Place::Keyed(at)));
        }
    }

    #[test]
    fn unknown_kinds_are_refused() {
        assert_eq!(Entry::ZERO.place(), Ok(Place::Zeros));
        for unknown in [Entry(3), Entry(8), Entry::UNSET, Entry::CLAIMED] {
            assert_eq!(unknown.place(), Err(unknown));
        }
    }
}
