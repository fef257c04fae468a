//! What a block's content is known by.

use dewar_units::PAGE_BYTES;
use std::fs::File;
use std::io::{self, Read};
use twox_hash::XxHash3_64;

/// What a block's content is known by, in 24 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    /// XXH3-64: quick, finds candidates and damage, and proves nothing.
    pub candidate: u64,
    /// The first half of its BLAKE3 under the key: the proof.
    pub proof: [u8; 16],
}

/// Hashes blocks under a random key that only this process knows.
#[derive(Debug)]
pub struct Hasher {
    key: [u8; 32],
}

impl Hasher {
    /// With a new key.
    ///
    /// # Errors
    /// Where the system has no random numbers.
    pub fn new() -> io::Result<Self> {
        let mut key = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        Ok(Self { key })
    }

    /// Of a block, which is [`PAGE_BYTES`] long.
    pub fn fingerprint(&self, block: &[u8]) -> Fingerprint {
        Fingerprint { candidate: candidate(block), proof: self.proof(block) }
    }

    /// The proof alone.
    pub fn proof(&self, block: &[u8]) -> [u8; 16] {
        debug_assert_eq!(block.len(), PAGE_BYTES);
        let hash = blake3::keyed_hash(&self.key, block);
        let mut proof = [0; 16];
        proof.copy_from_slice(&hash.as_bytes()[..16]);
        proof
    }
}

/// The quick hash of a block.
pub(crate) fn candidate(block: &[u8]) -> u64 {
    XxHash3_64::oneshot(block)
}
