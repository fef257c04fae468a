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

/// The file with the number of the first process of a container that came back: the runtime's last word.
pub fn pid_file(folder: &Path) -> PathBuf {
    folder.join("pid")
}

/// The socket of a restore that waits for a word.
pub fn held_socket(folder: &Path) -> PathBuf {
    folder.join("held.sock")
}

/// The first process of a container that waits for it.
pub fn held_process(folder: &Path) -> PathBuf {
    folder.join("held.json")
}

/// Says that a restore which has not come so far shall not wait.
pub fn unwanted(folder: &Path) -> PathBuf {
    folder.join("unwanted")
}

/// How the interfaces were before the network was made ready for a container.
pub fn prepared_network(folder: &Path) -> PathBuf {
    folder.join("network.json")
}

/// Where what podman needs to bring a container back is put together.
pub fn podman_folder(folder: &Path) -> PathBuf {
    folder.join("podman")
}

/// The archive for podman.
pub fn podman_archive(folder: &Path) -> PathBuf {
    podman_folder(folder).join("archive.tar")
}
