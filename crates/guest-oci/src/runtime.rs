//! An OCI runtime's own command line: runc(8), crun(1).

use crate::error::OciError;
use crate::strays::Strays;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a killed container may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// An OCI runtime, and where it keeps what it knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runtime {
    /// Its program: a path, or a name to look for.
    pub program: PathBuf,
    /// Its `--root`, where that is not its usual one.
    pub root: Option<PathBuf>,
}

/// How a container is, in the words of the OCI runtime specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It is being made.
    Creating,
    /// It is made, and its program was not started.
    Created,
    /// It runs.
    Running,
    /// Its processes are frozen.
    Paused,
    /// Its first process has ended.
    Stopped,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Creating | Self::Created => "not started",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "ended",
        })
    }
}

/// What a runtime says of a container.
#[derive(Debug, Clone, Deserialize)]
pub struct ContainerState {
    /// Its id.
    pub id: String,
    /// Its first process, as the host numbers it; 0 where there is none.
    #[serde(default)]
    pub pid: i32,
    /// How it is.
    pub status: Status,
    /// The folder with its `config.json`.
    pub bundle: PathBuf,
}

impl Runtime {
    /// Whether it is runc, by its name.
    pub(crate) fn is_runc(&self) -> bool {
        let name = self.program.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with("runc")
    }

    /// A command of it.
    pub(crate) fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.program);
        if let Some(root) = &self.root {
            command.arg("--root").arg(root);
        }
        command.arg(verb).stdin(Stdio::null());
        command
    }

    /// What it says of a container.
    ///
    /// # Errors
    /// [`OciError::NoSuchContainer`] where it knows none with that id.
    pub fn state(&self, id: &str) -> Result<ContainerState, OciError> {
        let output = self
            .command("state")
            .arg("--")
            .arg(id)
            .output()
            .map_err(|cause| OciError::NoRuntime { program: self.program.clone(), cause })?;
        if output.status.success() {
            return serde_json::from_slice(&output.stdout).map_err(|error| OciError::Runtime {
                operation: "asking for",
                id: id.to_owned(),
                cause: error.to_string(),
            });
        }
        let said = String::from_utf8_lossy(&output.stderr);
        if said.contains("does not exist") || said.contains("No such file") {
            return Err(OciError::NoSuchContainer {
                program: self.program.clone(),
                id: id.to_owned(),
            });
        }
        Err(OciError::Runtime {
            operation: "asking for",
            id: id.to_owned(),
            cause: last_line(&said),
        })
    }

    /// The same, where it may know none.
    ///
    /// # Errors
    /// As [`Runtime::state`], but for that.
    pub fn state_if_any(&self, id: &str) -> Result<Option<ContainerState>, OciError> {
        match self.state(id) {
            Err(OciError::NoSuchContainer { .. }) => Ok(None),
            state => state.map(Some),
        }
    }

    /// Sends a signal to the first process.
    ///
    /// # Errors
    /// Where it is not running.
    pub fn kill(&self, id: &str, signal: &str) -> Result<(), OciError> {
        let mut command = self.command("kill");
        command.arg("--").arg(id).arg(signal);
        self.run(command, "sending a signal to", id)
    }

    /// Freezes a container. The runtime is one of `strays`, should it outlive us.
    ///
    /// # Errors
    /// Where the runtime does not.
    pub(crate) fn pause(&self, id: &str, strays: &Strays) -> Result<(), OciError> {
        let mut command = self.command("pause");
        strays.mark(&mut command);
        command.arg("--").arg(id);
        self.run(command, "freezing", id)
    }

    /// Lets a container run that is frozen.
    ///
    /// # Errors
    /// Where the runtime does not.
    pub fn resume(&self, id: &str) -> Result<(), OciError> {
        let mut command = self.command("resume");
        command.arg("--").arg(id);
        self.run(command, "letting run", id)
    }

    /// Ends a container, whatever state it is in, and makes the runtime forget it. One that is not known
    /// is as good.
    ///
    /// # Errors
    /// Where it does not end.
    pub fn delete(&self, id: &str) -> Result<(), OciError> {
        if self.state_if_any(id)?.is_none() {
            return Ok(());
        }
        let began = Instant::now();
        loop {
            let mut command = self.command("delete");
            command.arg("--force").arg("--").arg(id);
            match self.run(command, "removing", id) {
                // Its processes may take a moment to end.
                Err(_) if began.elapsed() < ENDS_WITHIN => {
                    std::thread::sleep(Duration::from_millis(50));
                    if self.state_if_any(id)?.is_none() {
                        return Ok(());
                    }
                }
                result => return result,
            }
        }
    }

    fn run(&self, mut command: Command, operation: &'static str, id: &str) -> Result<(), OciError> {
        let output = command
            .output()
            .map_err(|cause| OciError::NoRuntime { program: self.program.clone(), cause })?;
        if output.status.success() {
            return Ok(());
        }
        let cause = last_line(&String::from_utf8_lossy(&output.stderr));
        Err(OciError::Runtime { operation, id: id.to_owned(), cause })
    }
}

/// What a runtime said last. runc's lines are `time="…" level=error msg="…"`.
pub(crate) fn last_line(said: &str) -> String {
    let line = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    match line.split_once("msg=\"") {
        Some((_, message)) => message.trim_end_matches('"').replace("\\\"", "\""),
        None => line.to_owned(),
    }
}

/// An option with a path, in an argument list.
pub(crate) fn option(name: &str, value: &Path) -> [OsString; 2] {
    [name.into(), value.into()]
}

/// The program's path, as it is found now.
pub(crate) fn find_program(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return std::path::absolute(program).ok().filter(|path| path.exists());
    }
    let path = std::env::var_os("PATH")?;
    // Not every user's PATH has them.
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
}
