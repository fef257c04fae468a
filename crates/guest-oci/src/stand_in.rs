//! The program that podman starts as its runtime: a link to `dewar`, which sets some environment variables and
//! then executes the real runtime.
//!
//! podman itself must not have these variables: its monitor would inherit them, and outlives the command. A
//! shell script would not do: the folder may lie in a file system from which no program is started.

use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The name by which it is started.
pub(crate) const STAND_IN: &str = "runtime-stand-in";

/// What it becomes.
#[derive(Serialize, Deserialize)]
struct Becomes {
    program: PathBuf,
    variables: Vec<(OsString, OsString)>,
}

/// Makes one in a folder, for a command's program and variables. It works as long as our process lives.
///
/// # Errors
/// Where it cannot be made.
pub(crate) fn make(folder: &Path, command: &Command) -> io::Result<PathBuf> {
    let variables = command
        .get_envs()
        .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())))
        .collect();
    let becomes = Becomes { program: command.get_program().into(), variables };
    let link = path(folder);
    fs::write(description_of(&link), serde_json::to_vec(&becomes)?)?;
    symlink(format!("/proc/{}/exe", std::process::id()), &link)?;
    Ok(link)
}

/// Where one in a folder is.
pub(crate) fn path(folder: &Path) -> PathBuf {
    folder.join(STAND_IN)
}

/// Becomes the runtime. `name` is the path by which this program was started.
pub(crate) fn become_runtime(name: &Path, words: &[OsString]) -> io::Error {
    let become_it = || -> io::Result<io::Error> {
        let becomes: Becomes = serde_json::from_slice(&fs::read(description_of(name))?)?;
        Ok(Command::new(becomes.program).envs(becomes.variables).args(words).exec())
    };
    become_it().unwrap_or_else(|error| error)
}

fn description_of(link: &Path) -> PathBuf {
    link.with_extension("json")
}
