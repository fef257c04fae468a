//! A container that a runtime knows.

use crate::error::OciError;
use crate::overlay::Overlay;
use crate::podman::{Definition, Podman};
use crate::podman_files;
use crate::processes::Processes;
use crate::processor::Processor;
use crate::runtime::{ContainerState, Runtime, Status, find_program};
use dewar_registry::{ContainerRecord, ProcessId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Tells the description of a container from that of a QEMU.
const KIND: &str = "container";

/// A container, by the runtime that runs it.
#[derive(Debug, Clone)]
pub struct Container {
    /// The runtime.
    pub runtime: Runtime,
    /// The id that the runtime knows it by.
    pub id: String,
    /// The folder with its `config.json`.
    pub bundle: PathBuf,
    /// The podman that has the runtime run it, if one does.
    pub podman: Option<Podman>,
}

/// What a checkpoint says of its container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Description {
    kind: String,
    /// The runtime.
    pub runtime: Runtime,
    /// The id that the runtime knew it by.
    pub id: String,
    /// The folder with its `config.json`.
    pub bundle: PathBuf,
    /// That file's content.
    pub config: Value,
    /// Its root file system, where that is an overlay: what was written there is in the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<Overlay>,
    /// The processor that its programs know, where CRIU can describe it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processor: Option<Processor>,
    /// The podman that had the runtime run it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub podman: Option<Podman>,
    /// What that knew of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub definition: Option<Definition>,
}

/// Whether a checkpoint's description is that of a container.
pub fn is_container(machine: &Value) -> bool {
    machine["kind"] == KIND
}

impl Description {
    /// Reads it from a checkpoint.
    ///
    /// # Errors
    /// Where it is none.
    pub fn parse(machine: Value) -> Result<Self, serde_json::Error> {
        serde_json::from_value(machine)
    }

    /// As a checkpoint holds it.
    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// That the processor of this machine can do what that which its programs know could.
    ///
    /// # Errors
    /// Where it cannot.
    pub fn require_processor(&self) -> Result<(), OciError> {
        self.processor.as_ref().map_or(Ok(()), |it| it.require_here(&self.id))
    }

    /// The container.
    pub fn container(&self) -> Container {
        Container {
            runtime: self.runtime.clone(),
            id: self.id.clone(),
            bundle: self.bundle.clone(),
            podman: self.podman.clone(),
        }
    }
}

impl Container {
    /// The container that a guest's record names.
    pub fn of(record: &ContainerRecord) -> Self {
        let runtime = Runtime { program: record.runtime.clone(), root: record.root.clone() };
        let podman = record.engine.as_ref().map(Podman::of);
        Self { runtime, id: record.id.clone(), bundle: record.bundle.clone(), podman }
    }

    /// For a guest's record.
    pub fn record(&self) -> ContainerRecord {
        ContainerRecord {
            runtime: self.runtime.program.clone(),
            root: self.runtime.root.clone(),
            id: self.id.clone(),
            bundle: self.bundle.clone(),
            engine: self.podman.as_ref().map(Podman::record),
        }
    }

    /// Looks for a running container. A runtime that is named without its folder is looked for; podman may be named
    /// in its place, and knows a container also by its name.
    ///
    /// # Errors
    /// Where the runtime knows none with that id, or it does not run.
    pub fn find(runtime: &Runtime, id: &str) -> Result<(Self, ProcessId), OciError> {
        let program = find_program(&runtime.program).ok_or_else(|| OciError::NoRuntime {
            program: runtime.program.clone(),
            cause: std::io::ErrorKind::NotFound.into(),
        })?;
        let root = runtime.root.as_ref().map(|it| std::path::absolute(it).unwrap_or(it.clone()));
        if Podman::is_one(&program) {
            return Self::find_by_podman(&Podman { program, root }, id);
        }
        let runtime = Runtime { program, root };
        let state = runtime.state(id)?;
        let process = running(&state)?;
        Ok((Self { runtime, id: state.id, bundle: state.bundle, podman: None }, process))
    }

    /// The same, as podman has it now: it may have put it elsewhere.
    ///
    /// # Errors
    /// Where podman does not tell.
    pub fn known_now(self) -> Result<Self, OciError> {
        match &self.podman {
            Some(podman) => Ok(Self::find_by_podman(podman, &self.id)?.0),
            None => Ok(self),
        }
    }

    pub(crate) fn find_by_podman(podman: &Podman, id: &str) -> Result<(Self, ProcessId), OciError> {
        let (runtime, state) = podman.find(id)?;
        let process = running(&state)?;
        let podman = Some(podman.clone());
        Ok((Self { runtime, id: state.id, bundle: state.bundle, podman }, process))
    }

    /// How it is, by who has it: podman, or the runtime. `None` where that knows no such container.
    ///
    /// # Errors
    /// Where it does not tell.
    pub fn state_if_any(&self) -> Result<Option<ContainerState>, OciError> {
        let Some(podman) = &self.podman else { return self.runtime.state_if_any(&self.id) };
        let known = podman.state_if_any(&self.id)?;
        if known.as_ref().is_some_and(|it| it.status == Status::Running) {
            // Whether its control group is frozen podman does not ask.
            let of_runtime =
                self.runtime.state_if_any(&self.id)?.filter(|it| it.status == Status::Paused);
            return Ok(of_runtime.or(known));
        }
        Ok(known)
    }

    /// Ends it, whatever state it is in. The runtime forgets it; podman knows it as one that has ended.
    ///
    /// # Errors
    /// Where it does not end.
    pub fn end(&self) -> Result<(), OciError> {
        match &self.podman {
            Some(podman) => podman.end(&self.id),
            None => self.runtime.delete(&self.id),
        }
    }

    /// Ends it, whatever state it is in, and nobody knows it any more. One that is not known is as good.
    ///
    /// # Errors
    /// Where it does not end.
    pub fn delete(&self) -> Result<(), OciError> {
        if let Some(podman) = &self.podman {
            podman.remove(&self.id)?;
        }
        // Also one that podman had not come to know.
        self.runtime.delete(&self.id)
    }

    /// Sends a signal to the first process.
    ///
    /// # Errors
    /// Where it is not running.
    pub fn kill(&self, signal: &str) -> Result<(), OciError> {
        match &self.podman {
            // It is not to start the container anew.
            Some(podman) => podman.kill(&self.id, signal),
            None => self.runtime.kill(&self.id, signal),
        }
    }

    /// Saves what it wrote to its files; it stands still.
    ///
    /// # Errors
    /// Where they cannot be read, or there is no room.
    pub fn save_files(
        &self,
        overlay: &Overlay,
        config: &Value,
        archive: &Path,
    ) -> Result<(), OciError> {
        match &self.podman {
            Some(_) => {
                let scratch = archive.with_extension("parts");
                podman_files::save(overlay, &self.rootfs(config), &self.bundle, &scratch, archive)
            }
            None => overlay.save(archive),
        }
    }

    /// Its first process.
    ///
    /// # Errors
    /// Where it does not run.
    pub fn process(&self) -> Result<ProcessId, OciError> {
        running(&self.runtime.state(&self.id)?)
    }

    /// Its processes, by their numbers here.
    ///
    /// # Errors
    /// Where it does not run.
    pub fn pids(&self) -> Result<Vec<i32>, OciError> {
        Ok(Processes::of(self.process()?.pid)?.pids().collect())
    }

    /// Bytes of memory that its processes have for themselves: what a dump of it takes, about.
    ///
    /// # Errors
    /// Where it does not run.
    pub fn memory_bytes(&self) -> Result<u64, OciError> {
        Ok(Processes::of(self.process()?.pid)?.anonymous_bytes())
    }

    /// Its configuration.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn config(&self) -> Result<Value, OciError> {
        let path = self.config_file();
        let text = fs::read(&path).map_err(OciError::io("read", &path))?;
        serde_json::from_slice(&text).map_err(|error| OciError::Io {
            operation: "read",
            path,
            cause: error.into(),
        })
    }

    /// Where that is.
    pub fn config_file(&self) -> PathBuf {
        self.bundle.join("config.json")
    }

    /// Its root file system, by its configuration.
    pub fn rootfs(&self, config: &Value) -> PathBuf {
        self.bundle.join(config["root"]["path"].as_str().unwrap_or("rootfs"))
    }

    /// What a checkpoint says of it.
    ///
    /// # Errors
    /// Where its configuration cannot be read.
    pub fn describe(&self) -> Result<Description, OciError> {
        let config = self.config()?;
        let definition = self.podman.as_ref().map(|podman| podman.define(&self.id)).transpose()?;
        Ok(Description {
            kind: KIND.to_owned(),
            overlay: Overlay::mounted_on(&self.rootfs(&config))?,
            processor: Processor::of_this_machine(),
            runtime: self.runtime.clone(),
            id: self.id.clone(),
            bundle: self.bundle.clone(),
            podman: self.podman.clone(),
            definition,
            config,
        })
    }
}

fn running(state: &ContainerState) -> Result<ProcessId, OciError> {
    let not_running = |status: String| OciError::NotRunning { id: state.id.clone(), status };
    if state.status != Status::Running {
        return Err(not_running(state.status.to_string()));
    }
    ProcessId::of(state.pid).ok_or_else(|| not_running("ending".to_owned()))
}
