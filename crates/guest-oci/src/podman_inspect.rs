//! What podman says of a container.

use crate::runtime::{ContainerState, Status};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What `podman container inspect` says, as far as it is asked.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Inspected {
    id: String,
    state: InspectedState,
    pub(crate) image_name: String,
    rootfs: String,
    pod: String,
    #[serde(default)]
    dependencies: Vec<String>,
    #[serde(rename = "OCIRuntime")]
    pub(crate) runtime: String,
    #[serde(default, rename = "OCIConfigPath")]
    config_path: PathBuf,
    pub(crate) static_dir: PathBuf,
    driver: String,
    #[serde(default)]
    host_config: HostConfig,
    #[serde(default)]
    config: Config,
    #[serde(default)]
    mounts: Vec<Mount>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Config {
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
    #[serde(default)]
    healthcheck_on_failure_action: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Mount {
    #[serde(rename = "Type")]
    kind: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HostConfig {
    #[serde(default)]
    auto_remove: bool,
    #[serde(default)]
    restart_policy: RestartPolicy,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RestartPolicy {
    #[serde(default)]
    name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct InspectedState {
    status: String,
    #[serde(default)]
    pid: i32,
}

impl Inspected {
    /// How it is.
    pub(crate) fn state(&self) -> ContainerState {
        let status = match self.state.status.as_str() {
            "running" | "stopping" => Status::Running,
            "paused" => Status::Paused,
            "created" | "configured" | "initialized" => Status::Created,
            _ => Status::Stopped,
        };
        ContainerState {
            id: self.id.clone(),
            pid: self.state.pid,
            status,
            bundle: self.static_dir.clone(),
        }
    }

    /// What keeps it from being saved or brought back.
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        let has_unit =
            self.config.labels.as_ref().is_some_and(|it| it.contains_key("PODMAN_SYSTEMD_UNIT"));
        let has_volumes = self.mounts.iter().any(|it| it.kind == "volume");
        let lies_elsewhere = self.config_path != self.static_dir.join("config.json");
        [
            (!self.pod.is_empty(), "it is in a pod, of which only the whole can be brought back: start it without one"),
            (
                !self.dependencies.is_empty(),
                "it shares namespaces of another container: start it with its own",
            ),
            (
                !self.rootfs.is_empty(),
                "it was started from a folder (--rootfs), and podman brings back only what has an image",
            ),
            (has_unit, "it is a unit of systemd, which would start another one in its place when it ends"),
            (
                self.host_config.auto_remove && has_volumes,
                "it was started with --rm: podman removes its volumes with it when it ends",
            ),
            (
                self.driver != "overlay",
                "podman's storage driver is not overlay: what it wrote to its files cannot be told",
            ),
            (
                self.runtime.contains('/'),
                "podman has its runtime by a path: name it in containers.conf, and start it with that name",
            ),
            (
                self.state.status == "running" && lies_elsewhere,
                "podman keeps its configuration in an unusual place",
            ),
        ]
        .into_iter()
        .filter_map(|(is_missing, what)| is_missing.then_some(what))
        .collect()
    }

    /// The policy by which podman starts it again when it has ended, where there is one.
    pub(crate) fn restart_policy(self) -> Option<String> {
        let on_failure = self.config.healthcheck_on_failure_action;
        let policies = [Some(self.host_config.restart_policy.name), on_failure];
        let is_one = |it: &String| !["", "no", "none"].contains(&it.as_str());
        policies.into_iter().flatten().find(is_one)
    }
}
