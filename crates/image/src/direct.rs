//! Writing segments past the page cache (`O_DIRECT`, open(2)): the copy into
//! it costs about as much as compressing does, and would push out what the
//! host's guests want there.

use crate::{ImageError, files};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// What addresses, lengths and offsets must be a multiple of, on any disk.
const ALIGNED: usize = 4096;

/// Writes files, one after the other; keeps its buffer.
#[derive(Debug, Default)]
pub(crate) struct DirectWriter {
    buffer: Vec<u8>,
}

impl DirectWriter {
    /// Writes a new file, to disk. Where the file system knows no `O_DIRECT`,
    /// through the page cache.
    pub(crate) fn write(&mut self, path: &Path, bytes: &[u8]) -> Result<(), ImageError> {
        let (file, is_direct) = create(path).map_err(ImageError::io("create", path))?;
        let whole = if is_direct { bytes.len() - bytes.len() % ALIGNED } else { 0 };
        let mut write = || -> io::Result<()> {
            if is_direct {
                file.write_all_at(self.aligned(&bytes[..whole]), 0)?;
                // The end of a file need not be a multiple of anything.
                fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::DIRECT)?;
            }
            file.write_all_at(&bytes[whole..], whole as u64)?;
            file.sync_data()
        };
        write().map_err(ImageError::io("write", path))
    }

    /// The same bytes at an aligned address.
    fn aligned(&mut self, bytes: &[u8]) -> &[u8] {
        self.buffer.resize(self.buffer.len().max(bytes.len() + ALIGNED), 0);
        let start = self.buffer.as_ptr().align_offset(ALIGNED);
        let place = &mut self.buffer[start..start + bytes.len()];
        place.copy_from_slice(bytes);
        place
    }
}

fn create(path: &Path) -> io::Result<(File, bool)> {
    let mut options = files::private_options();
    options.write(true).create_new(true);
    let direct = options.clone().custom_flags(OFlags::DIRECT.bits() as i32).open(path);
    match direct {
        // The file may have been made all the same.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
            files::private_options()
                .write(true)
                .create(true)
                .truncate(true)
                .open(path)
                .map(|file| (file, false))
        }
        other => other.map(|file| (file, true)),
    }
}
