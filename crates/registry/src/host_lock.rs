//! The right to do what concerns all guests of a root at once.

use crate::error::{RegistryError, io_error};
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

const LOCK: &str = "host-reboot.lock";

/// Other commands of this kind are kept out while it lives.
#[derive(Debug)]
pub struct HostLock {
    _file: File,
}

/// Takes it, without waiting.
pub(crate) fn lock(root: &Path) -> Result<HostLock, RegistryError> {
    let path = root.join(LOCK);
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.map_err(io_error("open", &path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(HostLock { _file: file }),
        Err(error) if error == rustix::io::Errno::WOULDBLOCK => {
            Err(RegistryError::Busy("the reboot of the host".to_owned()))
        }
        Err(error) => Err(io_error("lock", &path)(error.into())),
    }
}
