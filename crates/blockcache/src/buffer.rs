//! Memory that direct I/O accepts.

use dewar_units::PAGE_BYTES;

/// Bytes that begin at a page's boundary. Private: nobody writes them but the server.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Vec<u8>,
    skipped: usize,
    bytes: usize,
}

impl Buffer {
    /// So many zeros.
    pub(crate) fn new(bytes: usize) -> Self {
        let memory = vec![0; bytes + PAGE_BYTES];
        let skipped = memory.as_ptr().align_offset(PAGE_BYTES);
        Self { memory, skipped, bytes }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[self.skipped..self.skipped + self.bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.skipped..self.skipped + self.bytes]
    }
}
