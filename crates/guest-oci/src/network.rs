//! The network namespace of a container.
//!
//! runc and crun leave network interfaces to those who made them: a namespace that the configuration names by its path
//! is there before and after. One that the runtime made itself is made anew by a restore, with nothing in it but an
//! interface `lo` that is down, unless hooks of the configuration make more.

use crate::error::OciError;
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
    interfaces(pid)
}

/// The interfaces of a process's network that lead out of it.
fn interfaces(pid: i32) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap_or_default();
    let names = text.lines().skip(2).filter_map(|line| line.split_once(':'));
    let names = names.map(|(name, _)| name.trim()).filter(|name| *name != "lo");
    // Those that the kernel makes in each namespace.
    let is_made = |name: &&str| {
        ["tunl0", "sit0", "ip6tnl0", "ip6_vti0", "ip_vti0", "gre0", "gretap0", "erspan0"]
            .contains(name)
    };
    names.filter(|name| !is_made(name)).map(str::to_owned).collect()
}

/// Switches `lo` on in the network that a restore has made.
pub fn switch_on(pid: i32, config: &Value) {
    if is_own(config) {
        // Where it fails the container's user sees it, and can do the same.
        let _ = inside(pid, &["ip", "link", "set", "lo", "up"]);
    }
}

/// The chain of our own rules, apart from CRIU's.
const CHAIN: &str = "DEWAR";

/// Keeps a container from being heard in its network, and its network from answering for it: its address may be
/// elsewhere already. [`open`] takes that back. Closed twice is as good.
///
/// # Errors
/// Where it cannot be closed.
pub fn close(pid: i32) -> Result<(), OciError> {
    let Some(links) = links(pid) else { return Ok(()) };
    for program in programs(pid) {
        let table = |words: &[&str]| inside(pid, &[&[program, "-w"], words].concat());
        // It is there where it was closed before.
        let _ = table(&["-N", CHAIN]);
        table(&["-F", CHAIN]).and_then(|()| table(&["-A", CHAIN, "-j", "DROP"])).map_err(failed)?;
        for chain in ["INPUT", "OUTPUT"] {
            if table(&["-C", chain, "-j", CHAIN]).is_err() {
                table(&["-I", chain, "-j", CHAIN]).map_err(failed)?;
            }
        }
    }
    for link in links {
        inside(pid, &["ip", "link", "set", "dev", &link, "arp", "off"]).map_err(failed)?;
    }
    Ok(())
}

/// Lets a container be heard in its network. At the host that it comes to, interfaces that wait for it switched off are
/// switched on (`has_moved`).
///
/// # Errors
/// Where it stays closed.
pub fn open(pid: i32, has_moved: bool) -> Result<(), OciError> {
    let Some(links) = links(pid) else { return Ok(()) };
    for program in programs(pid) {
        let table = |words: &[&str]| inside(pid, &[&[program, "-w"], words].concat());
        if table(&["-n", "-L", CHAIN]).is_err() {
            continue;
        }
        for chain in ["INPUT", "OUTPUT"] {
            while table(&["-D", chain, "-j", CHAIN]).is_ok() {}
        }
        table(&["-F", CHAIN]).and_then(|()| table(&["-X", CHAIN])).map_err(failed)?;
    }
    for link in links {
        let mut words = vec!["ip", "link", "set", "dev", &link, "arp", "on"];
        words.extend(has_moved.then_some("up"));
        inside(pid, &words).map_err(failed)?;
    }
    Ok(())
}

/// The programs that keep packets out, of those that a namespace has packets for.
fn programs(pid: i32) -> impl Iterator<Item = &'static str> {
    let has_new = fs::metadata(format!("/proc/{pid}/net/if_inet6")).is_ok();
    std::iter::once("iptables").chain(has_new.then_some("ip6tables"))
}

/// The interfaces that lead out of a container's network; nothing where it is the host's, or none do.
fn links(pid: i32) -> Option<Vec<String>> {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    if !has_own(pid) || namespace(&pid.to_string()) == namespace("1") {
        return None;
    }
    let links = interfaces(pid);
    (!links.is_empty()).then_some(links)
}

/// Whether a process has a network that is not the one that we are in.
pub fn has_own(pid: i32) -> bool {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    namespace(&pid.to_string()) != namespace("self")
}

/// Runs a program in the network of a process; what it says against it otherwise.
fn inside(pid: i32, words: &[&str]) -> Result<(), String> {
    let mut command = Command::new("nsenter");
    command.args(["--target", &pid.to_string(), "--net"]).args(words).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("nsenter: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

fn failed(cause: String) -> OciError {
    OciError::Network { cause }
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
