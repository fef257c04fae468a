//! podman(1): it has containers of its own, and has a runtime run them.
//!
//! Such a container is saved through its runtime, as any other; podman need not know. It is brought back by podman
//! itself, from an archive of the kind that `podman container checkpoint --export` writes, so that podman has it in its
//! database, mounts its files and makes its network. What podman knows of a container goes into that archive too, and
//! only podman can write it down: it is told to export a checkpoint with a runtime that does nothing, and
//! nothing is frozen.
//!
//! The runtime that podman starts is a stand-in of ours, for this one command: conmon, which outlives it, must not
//! have in its environment what CRIU shall know, nor our mark ([`crate::strays`]).

use crate::error::OciError;
use crate::folder::{images, podman_archive, podman_folder};
use crate::podman_files::{self, SHM_FILES};
use crate::podman_inspect::Inspected;
use crate::runtime::{ContainerState, Runtime, Status, find_program, last_line, option};
use crate::stand_in;
use dewar_registry::Engine;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The oldest that takes settings for one command (`CONTAINERS_CONF_OVERRIDE`).
const OLDEST: (u32, u32) = (4, 5);
/// podman's own records in its archive.
const CONFIG: &str = "config.dump";
const SPEC: &str = "spec.dump";
const NETWORK: &str = "network.status";

/// A podman, and where it keeps its containers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Podman {
    /// Its program.
    pub program: PathBuf,
    /// Its `--root`, where that is not its usual one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<PathBuf>,
}

/// What podman knows of a container, in its own words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    /// The name of the image that it was made from.
    pub image: String,
    config: Value,
    spec: Value,
    network: Value,
}

impl Podman {
    /// Whether a program is one, by its name.
    pub fn is_one(program: &Path) -> bool {
        program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("podman"))
    }

    /// The one that a guest's record names.
    pub(crate) fn of(engine: &Engine) -> Self {
        Self { program: engine.program.clone(), root: engine.root.clone() }
    }

    /// For a guest's record.
    pub(crate) fn record(&self) -> Engine {
        Engine { program: self.program.clone(), root: self.root.clone() }
    }

    /// A container, by its name or id: its runtime, and how it is.
    ///
    /// # Errors
    /// Where podman knows none, or its runtime is not there.
    pub(crate) fn find(&self, id: &str) -> Result<(Runtime, ContainerState), OciError> {
        let known = self.inspect(id)?.ok_or_else(|| self.knows_none(id))?;
        let name = Path::new(&known.runtime);
        let program = find_program(name).ok_or_else(|| OciError::NoRuntime {
            program: name.to_owned(),
            cause: io::ErrorKind::NotFound.into(),
        })?;
        Ok((Runtime { program, root: None }, known.state()))
    }

    fn knows_none(&self, id: &str) -> OciError {
        OciError::NoSuchContainer { program: self.program.clone(), id: id.to_owned() }
    }

    pub(crate) fn state_if_any(&self, id: &str) -> Result<Option<ContainerState>, OciError> {
        Ok(self.inspect(id)?.as_ref().map(Inspected::state))
    }

    /// What keeps it from being saved or brought back.
    ///
    /// # Errors
    /// Where podman does not tell.
    pub(crate) fn missing(&self, id: &str) -> Result<Vec<String>, OciError> {
        let mut missing: Vec<String> = self.too_old()?.into_iter().collect();
        if let Some(known) = self.inspect(id)? {
            missing.extend(known.missing().into_iter().map(str::to_owned));
        }
        Ok(missing)
    }

    /// The policy by which it starts a container again that has ended or does not answer, where there is one.
    ///
    /// # Errors
    /// Where it does not tell.
    pub fn restart_policy(&self, id: &str) -> Result<Option<String>, OciError> {
        Ok(self.inspect(id)?.and_then(Inspected::restart_policy))
    }

    /// That it can bring back a container, whose folder was this one.
    ///
    /// # Errors
    /// Where it cannot, or does not tell.
    pub fn require_ready(
        &self,
        id: &str,
        definition: &Definition,
        bundle: &Path,
    ) -> Result<(), OciError> {
        let mut missing: Vec<String> = self.too_old()?.into_iter().collect();
        let output = self.run(&["info", "--format", "{{.Store.GraphRoot}}"])?;
        require(&output, "asking podman for", id)?;
        let root = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        if !bundle.starts_with(&root) {
            let (root, bundle) = (root.display(), bundle.display());
            missing.push(format!(
                "podman keeps its containers in {root}, and it was in {bundle}: name that by --root"
            ));
        }
        missing.extend(self.missing_image(definition)?);
        for name in definition.volumes() {
            if !self.run(&["volume", "exists", "--", name])?.status.success() {
                missing
                    .push(format!("its volume {name} is not here: podman would make an empty one"));
            }
        }
        let name = definition.config["name"].as_str().unwrap_or_default();
        if self.inspect(name)?.is_some_and(|it| it.state().id != id) {
            missing.push(format!("another container here has its name, {name}"));
        }
        match missing.is_empty() {
            true => Ok(()),
            false => Err(OciError::Unsupported { id: id.to_owned(), reasons: missing }),
        }
    }

    /// By its id, which podman makes the container from, and by its name: podman would pull what it has not by that.
    fn missing_image(&self, definition: &Definition) -> Result<Option<String>, OciError> {
        let (name, config) = (&definition.image, &definition.config);
        let id = config["rootfsImageID"].as_str().unwrap_or(name);
        let is_here =
            |image: &str| Ok(self.run(&["image", "exists", "--", image])?.status.success());
        if is_here(id)? && is_here(name)? {
            return Ok(None);
        }
        let id = id.get(..12).unwrap_or(id);
        Ok(Some(format!(
            "its image {name} ({id}) is not here by both its id and its name: 'podman save' it where it is, and \
             'podman load' it here"
        )))
    }

    fn too_old(&self) -> Result<Option<String>, OciError> {
        let words = ["version", "--format", "{{.Client.Version}}"];
        let output = self.run(&words)?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let mut numbers = text.split('.').map_while(|it| it.parse::<u32>().ok());
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let (major, minor) = OLDEST;
        let old = format!("podman {text} is too old: install version {major}.{minor} or later");
        Ok((version < OLDEST).then_some(old))
    }

    /// Sends a signal to the first process of a container.
    ///
    /// # Errors
    /// Where it is not running.
    pub(crate) fn kill(&self, id: &str, signal: &str) -> Result<(), OciError> {
        self.require("sending a signal to", id, &["kill", "--signal", signal, "--", id])
    }

    /// Ends a container for good; podman knows it as one that has ended.
    ///
    /// # Errors
    /// Where it does not end.
    pub(crate) fn end(&self, id: &str) -> Result<(), OciError> {
        match self.inspect(id)?.map(|it| it.state().status) {
            None => return Ok(()),
            // It does not stop one that is frozen.
            Some(Status::Paused) => self.require("ending", id, &["unpause", "--", id])?,
            Some(_) => {}
        }
        self.require("ending", id, &["stop", "--time", "0", "--", id])
    }

    /// Removes a container, whatever state it is in. One that is not known is as good.
    ///
    /// # Errors
    /// Where it is not removed.
    pub(crate) fn remove(&self, id: &str) -> Result<(), OciError> {
        // Also files of one that a killed podman had not come to know.
        self.require("removing", id, &["rm", "--force", "--ignore", "--time", "0", "--", id])
    }

    /// What it knows of a container.
    ///
    /// # Errors
    /// Where it does not tell.
    pub(crate) fn define(&self, id: &str) -> Result<Definition, OciError> {
        let known = self.inspect(id)?.ok_or_else(|| self.knows_none(id))?;
        let folder = tempfile::tempdir().map_err(OciError::io("make", Path::new("a folder")))?;
        let archive = folder.path().join("export.tar");
        let idle = find_program(Path::new("true")).unwrap_or_else(|| "/bin/true".into());
        // It leaves a copy of /dev/shm beside its records.
        let copy = known.static_dir.join(SHM_FILES);
        let was_there = copy.exists();
        let mut command = self.command();
        set_runtime(&mut command, &known.runtime, &idle, folder.path())?;
        command.args(["container", "checkpoint", "--leave-running", "--compress", "none"]);
        command.args(["--ignore-rootfs", "--ignore-volumes"]).args(option("--export", &archive));
        let output = self.output(command.arg("--").arg(id))?;
        if !was_there {
            let _ = fs::remove_file(&copy);
        }
        require(&output, "asking podman for", id)?;
        let read = |name: &str| -> Result<Value, OciError> {
            let mut tar = Command::new("tar");
            tar.args(["--extract", "--to-stdout"]).args(option("--file", &archive)).arg(name);
            let output =
                tar.stdin(Stdio::null()).output().map_err(OciError::io("read", &archive))?;
            serde_json::from_slice(&output.stdout).map_err(|error| OciError::Runtime {
                operation: "asking podman for",
                id: id.to_owned(),
                cause: format!("its {name}: {error}"),
            })
        };
        Ok(Definition {
            image: known.image_name,
            config: read(CONFIG)?,
            spec: read(SPEC)?,
            network: read(NETWORK)?,
        })
    }

    /// The command that brings a container back from the archive of a folder. `runtime` is what would be run without
    /// podman: its variables are for the runtime alone. Should we be killed, [`Podman::end_restores`] finds it.
    ///
    /// # Errors
    /// Where what it needs cannot be written.
    pub(crate) fn restore_command(
        &self,
        runtime: &Command,
        folder: &Path,
    ) -> Result<Command, OciError> {
        let inside = podman_folder(folder);
        let stand_in = stand_in::make(&inside, runtime).map_err(OciError::io("write", &inside))?;
        let program = Path::new(runtime.get_program());
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let mut command = self.command();
        set_runtime(&mut command, &name, &stand_in, &inside)?;
        command
            .args(["container", "restore", "--tcp-established", "--file-locks"])
            .arg("--ignore-volumes")
            .args(option("--import", &podman_archive(folder)));
        Ok(command)
    }

    /// Whether it knows a container as one that runs, with this first process.
    pub(crate) fn knows_running(&self, id: &str, pid: i32) -> bool {
        let state = self.state_if_any(id).ok().flatten();
        state.is_some_and(|it| it.status == Status::Running && it.pid == pid)
    }

    /// Removes a container that does not run.
    ///
    /// # Errors
    /// Where it is not removed.
    pub(crate) fn remove_if_ended(&self, id: &str) -> Result<(), OciError> {
        match self.state_if_any(id)? {
            Some(state) if state.status != Status::Running => self.remove(id),
            _ => Ok(()),
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        if let Some(root) = &self.root {
            command.arg("--root").arg(root);
        }
        command.stdin(Stdio::null());
        command
    }

    fn inspect(&self, id: &str) -> Result<Option<Inspected>, OciError> {
        let operation = "asking podman for";
        let output = self.run(&["container", "inspect", "--", id])?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).to_lowercase();
            return match said.contains("no such container") {
                true => Ok(None),
                false => require(&output, operation, id).map(|()| None),
            };
        }
        let found: Vec<Inspected> = serde_json::from_slice(&output.stdout).map_err(|error| {
            OciError::Runtime { operation, id: id.to_owned(), cause: error.to_string() }
        })?;
        Ok(found.into_iter().next())
    }

    fn require(&self, operation: &'static str, id: &str, words: &[&str]) -> Result<(), OciError> {
        require(&self.run(words)?, operation, id)
    }

    fn run(&self, words: &[&str]) -> Result<Output, OciError> {
        self.output(self.command().args(words))
    }

    fn output(&self, command: &mut Command) -> Result<Output, OciError> {
        command
            .output()
            .map_err(|cause| OciError::NoRuntime { program: self.program.clone(), cause })
    }
}

impl Definition {
    /// The names of its volumes.
    fn volumes(&self) -> impl Iterator<Item = &str> {
        let volumes = self.config["namedVolumes"].as_array().into_iter().flatten();
        volumes.filter_map(|it| it["volumeName"].as_str())
    }

    /// Writes the archive from which podman brings the container back: CRIU's images are in the folder, and what is
    /// brought of its files in `files`. The archive only says where they lie.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn put_together(&self, folder: &Path, files: Option<&Path>) -> Result<(), OciError> {
        let inside = podman_folder(folder);
        let parts = inside.join("parts");
        fs::create_dir_all(&parts).map_err(OciError::io("create", &parts))?;
        for (name, value) in [(CONFIG, &self.config), (SPEC, &self.spec), (NETWORK, &self.network)]
        {
            let path = parts.join(name);
            fs::write(&path, value.to_string()).map_err(OciError::io("write", &path))?;
        }
        let link = |from: &Path, name: &str| {
            let path = parts.join(name);
            symlink(from, &path).map_err(OciError::io("write", &path))
        };
        link(&images(folder), "checkpoint")?;
        if let Some(files) = files {
            let unpacked = inside.join("files");
            podman_files::unpack(files, &unpacked)?;
            for name in podman_files::NAMES {
                if unpacked.join(name).exists() {
                    link(&unpacked.join(name), name)?;
                }
            }
        }
        podman_files::pack(&parts, &podman_archive(folder))
    }
}

/// Has podman run another program in its runtime's place.
///
/// The settings are its standard input: conmon hands the variable on to the podman that it starts when the container has
/// ended, and that has an empty one.
fn set_runtime(
    podman: &mut Command,
    name: &str,
    program: &Path,
    folder: &Path,
) -> Result<(), OciError> {
    let path = folder.join("podman.conf");
    // TOML has strings as JSON has them.
    let text = format!(
        "[engine.runtimes]\n{} = [{}]\n",
        Value::from(name),
        Value::from(program.to_string_lossy())
    );
    fs::write(&path, text).map_err(OciError::io("write", &path))?;
    let settings = File::open(&path).map_err(OciError::io("open", &path))?;
    podman.env("CONTAINERS_CONF_OVERRIDE", "/proc/self/fd/0").stdin(settings);
    Ok(())
}

fn require(output: &Output, operation: &'static str, id: &str) -> Result<(), OciError> {
    if output.status.success() {
        return Ok(());
    }
    let cause = last_line(&String::from_utf8_lossy(&output.stderr));
    Err(OciError::Runtime { operation, id: id.to_owned(), cause })
}
