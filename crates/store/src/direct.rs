//! Writing segments past the page cache (`O_DIRECT`, open(2)): the copy into
//! it costs about as much as compressing does, and would push out what the
//! host's guests want there.

use crate::aligned::ALIGNED;
use crate::{StoreError, files};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Writes a new file, to disk. Where the bytes do not lie as `O_DIRECT` wants them, or
/// the file system does not know it, through the page cache.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let is_aligned = bytes.as_ptr().addr() % ALIGNED == 0;
    let (file, is_direct) = create(path, is_aligned).map_err(StoreError::io("create", path))?;
    let whole = if is_direct { bytes.len() - bytes.len() % ALIGNED } else { 0 };
    let write = || -> io::Result<()> {
        if is_direct {
            file.write_all_at(&bytes[..whole], 0)?;
            // The end of a file need not be a multiple of anything.
            fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::DIRECT)?;
        }
        file.write_all_at(&bytes[whole..], whole as u64)?;
        file.sync_data()
    };
    write().map_err(StoreError::io("write", path))
}

/// Makes a file, for direct writing if that is wanted and can be.
fn create(path: &Path, wants_direct: bool) -> io::Result<(File, bool)> {
    let mut options = files::private_options();
    options.write(true).create_new(true);
    if !wants_direct {
        return options.open(path).map(|file| (file, false));
    }
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
