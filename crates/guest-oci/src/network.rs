//! The network namespace of a container.
//!
//! runc and crun leave network interfaces to those who made them: a namespace that the configuration names by its path
//! is there before and after. One that the runtime made itself is made anew by a restore, with nothing in it but an
//! interface `lo` that is down, unless hooks of the configuration make more.

use serde_json::Value;
use std::fs;
use std::process::{Command, Stdio};

/// Whether the runtime makes the namespace.
fn is_own(config: &Value) -> bool {
    let all = config["linux"]["namespaces"].as_array();
    let network = all.and_then(|all| all.iter().find(|it| it["type"] == "network"));
    network.is_some_and(|it| it["path"].as_str().unwrap_or_default().is_empty())
}

fn has_hooks(config: &Value) -> bool {
    ["prestart", "createRuntime"]
        .iter()
        .any(|kind| config["hooks"][kind].as_array().is_some_and(|hooks| !hooks.is_empty()))
}

/// The interfaces of a process's network that nobody would make at a restore.
pub fn lost_interfaces(pid: i32, config: &Value) -> Vec<String> {
    if !is_own(config) || has_hooks(config) {
        return Vec::new();
    }
    let text = fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap_or_default();
    let names = text.lines().skip(2).filter_map(|line| line.split_once(':'));
    let names = names.map(|(name, _)| name.trim()).filter(|name| *name != "lo");
    // Those that the kernel makes in each namespace.
    let is_made = |name: &&str| !["tunl0", "sit0", "ip6tnl0", "gre0", "erspan0"].contains(name);
    names.filter(is_made).map(str::to_owned).collect()
}

/// Switches `lo` on in the network that a restore has made.
pub fn switch_on(pid: i32, config: &Value) {
    if !is_own(config) {
        return;
    }
    let mut command = Command::new("nsenter");
    command.args(["--target", &pid.to_string(), "--net", "ip", "link", "set", "lo", "up"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // Where it fails the container's user sees it, and can do the same.
    let _ = command.status();
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_a_network_that_the_runtime_makes_is_made_anew() {
        let config = |network: Value| json!({"linux": {"namespaces": [{"type": "pid"}, network]}});
        assert!(is_own(&config(json!({"type": "network"}))));
        assert!(!is_own(&config(json!({"type": "network", "path": "/run/netns/a"}))));
        assert!(!is_own(&config(json!({"type": "ipc"}))));
        let hooked = json!({
            "linux": {"namespaces": [{"type": "network"}]}, "hooks": {"prestart": [{"path": "/x"}]},
        });
        assert_eq!(lost_interfaces(std::process::id() as i32, &hooked), [] as [String; 0]);
    }
}
