//! `qemu-img`, run so that a command that dies leaves no file behind.
//!
//! The tool dies with the command that started it, but only *after* the command's files
//! are closed. The guardian may look before that, and remove a file that the tool
//! then makes again. So the tool never makes a file by name: the command makes it, and
//! hands it over as standard input. What is written after the guardian looked has no name any more.

use crate::disks::DiskError;
use crate::launch::without_ours;
use dewar_kernel::die_with_us;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Our standard input, as a path that opens the very file.
pub(crate) const STDIN: &str = "/proc/self/fd/0";

/// Makes a new file, private to its owner.
pub(crate) fn create_private(path: &Path) -> Result<File, DiskError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| DiskError::File(format!("cannot create {}", path.display()), error))
}

/// Runs `qemu-img` to the end; `file` is what it finds at [`STDIN`].
pub(crate) fn run(file: Option<File>, arguments: &[&str]) -> Result<(), DiskError> {
    let mut command = Command::new("qemu-img");
    command.stdin(file.map_or_else(Stdio::null, Stdio::from));
    let output = die_with_us(without_ours(command.args(arguments)))
        .output()
        .map_err(|error| DiskError::File("cannot run qemu-img".to_owned(), error))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(DiskError::Tool(format!("{}: {}", arguments[0], said.trim())))
}
