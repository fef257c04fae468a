//! What lies where in the folder of a dump, or of a restore.

use std::path::{Path, PathBuf};

/// The images in the folder of a dump.
pub fn images(folder: &Path) -> PathBuf {
    folder.join("images")
}

/// CRIU's logs there.
pub fn work(folder: &Path) -> PathBuf {
    folder.join("work")
}

/// What the runtime says.
pub fn runtime_log(folder: &Path) -> PathBuf {
    folder.join("runtime.log")
}

/// Where CRIU finds settings of ours.
pub fn settings(folder: &Path) -> PathBuf {
    folder.join("criu.conf")
}

/// The file of copies of pages.
pub fn staging_file(folder: &Path) -> PathBuf {
    folder.join("staging")
}
