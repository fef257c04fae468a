//! The length and the hash of a file.

use crate::ImageError;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The length and BLAKE3 hash of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDigest {
    /// Bytes.
    pub bytes: u64,
    /// Hash of all of them, in hexadecimal.
    pub blake3: String,
}

impl FileDigest {
    /// Reads a whole file.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn of(path: &Path) -> Result<Self, ImageError> {
        let failed = |cause| ImageError::io("read", path)(cause);
        let mut file = File::open(path).map_err(failed)?;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            let count = file.read(&mut buffer).map_err(failed)?;
            if count == 0 {
                return Ok(Self { bytes, blake3: hasher.finalize().to_hex().to_string() });
            }
            hasher.update(&buffer[..count]);
            bytes += count as u64;
        }
    }
}
