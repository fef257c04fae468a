//! Bytes at an address that `O_DIRECT` takes (open(2)), so that they need not be copied
//! to be written.

use std::ops::Deref;

/// What addresses, lengths and offsets must be a multiple of, on any disk.
pub(crate) const ALIGNED: usize = 4096;

/// A growing row of bytes that begins at a multiple of 4096.
#[derive(Debug, Default)]
pub struct AlignedBytes {
    memory: Vec<u8>,
    /// Where in `memory` they begin.
    start: usize,
}

impl AlignedBytes {
    /// Makes room, so that no later byte moves those before.
    pub fn reserve(&mut self, more: usize) {
        if self.memory.capacity() - self.memory.len() >= more {
            return;
        }
        let mut memory: Vec<u8> = Vec::with_capacity(self.len() + more + ALIGNED);
        let start = memory.as_ptr().align_offset(ALIGNED);
        memory.resize(start, 0);
        memory.extend_from_slice(self);
        *self = Self { memory, start };
    }

    /// Adds bytes at the end.
    pub fn extend(&mut self, bytes: &[u8]) {
        if self.memory.capacity() - self.memory.len() < bytes.len() {
            self.reserve(bytes.len().max(self.len()));
        }
        self.memory.extend_from_slice(bytes);
    }

    /// Removes all bytes and keeps their memory.
    pub fn clear(&mut self) {
        self.memory.truncate(self.start);
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_stay_aligned_and_whole_as_they_grow() {
        let mut bytes = AlignedBytes::default();
        let mut expected = Vec::new();
        for round in 0..3 {
            for length in [1, 5, 4096, 0, 100_000, 7] {
                bytes.extend(&vec![length as u8 ^ round; length]);
                expected.extend(vec![length as u8 ^ round; length]);
                assert!(bytes.as_ptr().addr() % ALIGNED == 0 || bytes.is_empty());
                assert!(*bytes == expected[..]);
            }
            bytes.clear();
            expected.clear();
            assert!(bytes.is_empty());
        }
    }
}
