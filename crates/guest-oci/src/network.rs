//! The network namespace of a container.
//!
//! runc and crun leave network interfaces to those who made them: a namespace that the configuration names by its path
//! is there before and after. One that the runtime made itself is made anew by a restore, with nothing in it but an
//! interface `lo` that is down, unless hooks of the configuration make more.

use crate::error::OciError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{self, File};
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What a configuration says of the namespace; nothing where the host's is used.
fn namespace(config: &Value) -> Option<&Value> {
    config["linux"]["namespaces"].as_array()?.iter().find(|it| it["type"] == "network")
}

/// Whether the runtime makes the namespace.
fn is_own(config: &Value) -> bool {
    namespace(config).is_some_and(|it| it["path"].as_str().unwrap_or_default().is_empty())
}

/// Whether the container has a network apart from the host's.
pub fn is_apart(config: &Value) -> bool {
    namespace(config).is_some()
}

fn has_hooks(config: &Value) -> bool {
    ["prestart", "createRuntime"]
        .iter()
        .any(|kind| config["hooks"][kind].as_array().is_some_and(|hooks| !hooks.is_empty()))
}

/// A network namespace, by a path to it.
#[derive(Debug, Clone)]
pub struct Network {
    path: PathBuf,
    /// A variable for the programs that are run in it, by which they are known should they outlive us.
    mark: Option<(&'static str, String)>,
}

/// How the interfaces of a network were before it was closed, or prepared.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Openings {
    /// Whether it is apart from the host's own, and leads anywhere.
    is_apart: bool,
    /// Interfaces that tell whose addresses they have.
    telling: Vec<String>,
    /// Interfaces that are switched off.
    off: Vec<String>,
    /// Whether our own rules were there already.
    is_closed: bool,
}

/// A network namespace that is there as long as this is.
#[derive(Debug)]
pub struct HeldNetwork {
    network: Network,
    _file: File,
}

impl HeldNetwork {
    /// That of a process that runs now; nothing where it has ended.
    pub fn of(pid: i32) -> Option<Self> {
        let file = File::open(Network::of(pid).path).ok()?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Some(Self { network: Network::at(path.into()), _file: file })
    }
}

impl Deref for HeldNetwork {
    type Target = Network;

    fn deref(&self) -> &Network {
        &self.network
    }
}

impl Network {
    fn at(path: PathBuf) -> Self {
        Self { path, mark: None }
    }

    /// The same; programs that are run in it have this variable.
    #[must_use]
    pub fn marked(self, mark: (&'static str, String)) -> Self {
        Self { mark: Some(mark), ..self }
    }

    /// That of a process.
    pub fn of(pid: i32) -> Self {
        Self::at(format!("/proc/{pid}/ns/net").into())
    }

    /// The one that a configuration names.
    pub fn named(config: &Value) -> Option<Self> {
        let path = namespace(config)?["path"].as_str().filter(|path| !path.is_empty())?;
        Some(Self::at(path.into()))
    }

    /// Takes away the rules that a CRIU which was killed left in it; where there are none nothing happens.
    pub fn unlock(&self) {
        for program in ["iptables", "ip6tables"] {
            let steps: [&[&str]; 4] =
                [&["-D", "INPUT", "-j"], &["-D", "OUTPUT", "-j"], &["-F"], &["-X"]];
            for step in steps {
                // Each fails where CRIU had not come so far.
                let _ = self.run(&[&[program, "-w"], step, &[CRIU_CHAIN]].concat());
            }
        }
    }

    /// Forgets connections of processes that have ended: it is closed, so their other ends never hear of that, and the
    /// connections may be another host's now. Kernels without `CONFIG_INET_DIAG_DESTROY` keep them for some minutes.
    pub fn forget_connections(&self) {
        let _ = self.run(&["ss", "-K", "-t", "state", "fin-wait-1"]);
        let _ = self.run(&["ss", "-K", "-t", "state", "last-ack"]);
        let _ = self.run(&["ss", "-K", "-t", "state", "closing"]);
    }

    /// The interfaces that lead out of it.
    fn interfaces(&self) -> Vec<String> {
        let text = self.run(&["cat", "/proc/net/dev"]).unwrap_or_default();
        let names = text.lines().skip(2).filter_map(|line| line.split_once(':'));
        let names = names.map(|(name, _)| name.trim()).filter(|name| *name != "lo");
        // Those that the kernel makes in each namespace.
        let is_made = |name: &&str| {
            [
                "tunl0", "sit0", "ip6tnl0", "ip6_vti0", "ip_vti0", "gre0", "gretap0", "erspan0",
                "ip6gre0",
            ]
            .contains(name)
        };
        names.filter(|name| !is_made(name)).map(str::to_owned).collect()
    }

    /// The interfaces that [`Network::close`] changes: those that tell whose addresses they have. Nothing where it is
    /// the host's own.
    ///
    /// # Errors
    /// Where it cannot be looked at.
    pub fn openings(&self) -> Result<Openings, OciError> {
        let Some(links) = self.links() else { return Ok(Openings::default()) };
        let is_closed = self.has_chain(CHAIN);
        let mut openings = Openings { is_apart: true, is_closed, ..Openings::default() };
        for link in links {
            let flags = self.flags(&link)?;
            let has = |wanted: &str| flags.iter().any(|flag| flag == wanted);
            if !has("UP") {
                openings.off.push(link);
            } else if !has("NOARP") {
                openings.telling.push(link);
            }
        }
        Ok(openings)
    }

    fn flags(&self, link: &str) -> Result<Vec<String>, OciError> {
        let shown = self.run(&["ip", "-o", "link", "show", "dev", link]).map_err(failed)?;
        let flags = shown.split_once('<').and_then(|(_, rest)| rest.split_once('>'));
        Ok(flags
            .map(|(flags, _)| flags.split(',').map(str::to_owned).collect())
            .unwrap_or_default())
    }

    /// Keeps what is in it from being heard, and it from answering for that: its addresses may be elsewhere already.
    /// [`Network::open`] takes that back. Closed twice is as good.
    ///
    /// # Errors
    /// Where it cannot be closed.
    pub fn close(&self, openings: &Openings) -> Result<(), OciError> {
        if !openings.is_apart {
            return Ok(());
        }
        for program in self.programs() {
            let table = |words: &[&str]| self.run(&[&[program, "-w"], words].concat());
            // It is there where it was closed before, and is never without its rule then.
            let _ = table(&["-N", CHAIN]);
            if table(&["-C", CHAIN, "-j", "DROP"]).is_err() {
                table(&["-A", CHAIN, "-j", "DROP"]).map_err(failed)?;
            }
            for chain in HOOKS {
                if table(&["-C", chain, "-j", CHAIN]).is_err() {
                    table(&["-I", chain, "-j", CHAIN]).map_err(failed)?;
                }
            }
        }
        for link in &openings.telling {
            self.run(&["ip", "link", "set", "dev", link, "arp", "off"]).map_err(failed)?;
        }
        Ok(())
    }

    /// Lets what is in it be heard again; `openings` are those that it was closed with.
    ///
    /// # Errors
    /// Where it stays closed.
    pub fn open(&self, openings: &Openings) -> Result<(), OciError> {
        let mut opened = self.remove_chain();
        for link in &openings.telling {
            let told = self.run(&["ip", "link", "set", "dev", link, "arp", "on"]);
            // One that is gone needs nothing.
            if self.interfaces().contains(link) {
                opened = opened.and(told.map(drop).map_err(failed));
                self.announce(link);
            }
        }
        opened
    }

    /// Takes away our own rules; where there are none nothing happens.
    fn remove_chain(&self) -> Result<(), OciError> {
        for program in self.programs() {
            let table = |words: &[&str]| self.run(&[&[program, "-w"], words].concat());
            let rules = table(&["-S"]).map_err(failed)?;
            if !rules.lines().any(|line| line == format!("-N {CHAIN}")) {
                continue;
            }
            for chain in HOOKS {
                while table(&["-D", chain, "-j", CHAIN]).is_ok() {}
            }
            table(&["-F", CHAIN]).and_then(|_| table(&["-X", CHAIN])).map_err(failed)?;
        }
        Ok(())
    }

    /// Makes it ready for a container that comes: interfaces that are switched off are switched on, since connections
    /// are restored only where there is a way for them, but neither told of nor heard. `openings` is how they are now.
    ///
    /// # Errors
    /// Where that cannot be.
    pub fn prepare(&self, openings: &Openings) -> Result<(), OciError> {
        if self.has_chain(CRIU_CHAIN) {
            // Of one that was killed: none is at work here now.
            self.unlock();
        }
        self.close(&Openings { is_apart: openings.is_apart, ..Openings::default() })?;
        for link in &openings.off {
            self.run(&["ip", "link", "set", "dev", link, "arp", "off", "up"]).map_err(failed)?;
        }
        Ok(())
    }

    /// Takes back what [`Network::prepare`] has done: the container does not come.
    pub fn put_off(&self, openings: &Openings) {
        for link in &openings.off {
            let _ = self.run(&["sh", "-c", SWITCH_OFF, "sh", link]);
        }
        if !openings.is_closed {
            let _ = self.remove_chain();
        }
    }

    /// Opens it for a container that has come: its interfaces are switched on, and tell whose addresses they have, from
    /// now on and at once.
    ///
    /// # Errors
    /// Where it stays closed.
    pub fn take_over(&self) -> Result<(), OciError> {
        self.tell(&["up"])
    }

    /// Opens it for a container that is started there, if one that has left had it closed.
    ///
    /// # Errors
    /// Where it stays closed.
    pub fn open_if_closed(&self) -> Result<(), OciError> {
        if self.has_chain(CRIU_CHAIN) {
            self.unlock();
        }
        match self.has_chain(CHAIN) {
            true => self.tell(&[]),
            false => Ok(()),
        }
    }

    fn tell(&self, more: &[&str]) -> Result<(), OciError> {
        let Some(links) = self.links() else { return Ok(()) };
        self.remove_chain()?;
        for link in links {
            let shown = self.run(&["ip", "-d", "-o", "link", "show", "dev", &link]);
            // One of that kind has none to tell of, ever.
            let is_silent = shown.is_ok_and(|it| it.contains("ipvlan") && it.contains("mode l3"));
            let how: &[&str] = if is_silent { &[] } else { &["arp", "on"] };
            let words = [how, more].concat();
            if !words.is_empty() {
                let set = [&["ip", "link", "set", "dev", &link], &words[..]].concat();
                self.run(&set).map_err(failed)?;
            }
            self.announce(&link);
        }
        Ok(())
    }

    /// Where that fails others find it when they ask anew.
    fn announce(&self, link: &str) {
        let _ = self.run(&["sh", "-c", ANNOUNCE, "sh", link]);
    }

    /// Whether there is a chain of rules by this name.
    fn has_chain(&self, chain: &str) -> bool {
        self.programs().any(|program| {
            let rules = self.run(&[program, "-w", "-S"]).unwrap_or_default();
            rules.lines().any(|line| line == format!("-N {chain}"))
        })
    }

    /// Processes that have this network.
    pub fn users(&self) -> Vec<i32> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|it| it.file_name().to_string_lossy().parse::<i32>().ok());
        pids.filter(|pid| self.is_same(&Self::of(*pid))).collect()
    }

    /// The programs that keep packets out, of those that it has packets for.
    fn programs(&self) -> impl Iterator<Item = &'static str> {
        let has_new = self.run(&["cat", "/proc/net/if_inet6"]).is_ok();
        std::iter::once("iptables").chain(has_new.then_some("ip6tables"))
    }

    /// The interfaces that lead out of it; nothing where it is the host's, or none do.
    fn links(&self) -> Option<Vec<String>> {
        if self.is_same(&Self::of(1)) || self.is_same(&Self::at("/proc/self/ns/net".into())) {
            return None;
        }
        let links = self.interfaces();
        (!links.is_empty()).then_some(links)
    }

    fn is_same(&self, other: &Self) -> bool {
        let which = |path: &Path| fs::metadata(path).ok().map(|it| (it.dev(), it.ino()));
        which(&self.path).is_some_and(|it| Some(it) == which(&other.path))
    }

    /// Runs a program in it. Returns its output; what it says against it otherwise.
    fn run(&self, words: &[&str]) -> Result<String, String> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path.display())).args(words).stdin(Stdio::null());
        if let Some((name, value)) = &self.mark {
            command.env(name, value);
        }
        // Not every user's has them.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"));
        let output = command.output().map_err(|error| format!("nsenter: {error}"))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    }
}

/// The interfaces of a process's network that nobody would make at a restore.
pub fn lost_interfaces(pid: i32, config: &Value) -> Vec<String> {
    match !is_own(config) || has_hooks(config) {
        true => Vec::new(),
        false => Network::of(pid).interfaces(),
    }
}

/// Switches `lo` on in the network that a restore has made.
pub fn switch_on(pid: i32, config: &Value) {
    if is_own(config) {
        // Where it fails the container's user sees it, and can do the same.
        let _ = Network::of(pid).run(&["ip", "link", "set", "lo", "up"]);
    }
}

/// Where packets come through.
const HOOKS: [&str; 3] = ["INPUT", "OUTPUT", "FORWARD"];
/// The chain of our own rules.
const CHAIN: &str = "DEWAR";
/// The chain of CRIU's (`criu/netfilter.c`, `criu/net.c`).
const CRIU_CHAIN: &str = "CRIU";

/// Has the kernel tell an interface's neighbours who has its addresses now: it does so when the interface is given its
/// hardware address (Documentation/networking/ip-sysctl.rst, `arp_notify`, `ndisc_notify`).
const ANNOUNCE: &str = "\
    address=$(ip -o link show dev \"$1\" | sed -n 's,.*link/ether \\([^ ]*\\).*,\\1,p')
    old=/proc/sys/net/ipv4/conf/$1/arp_notify new=/proc/sys/net/ipv6/conf/$1/ndisc_notify
    was_old=$(cat \"$old\") was_new=$(cat \"$new\" 2>/dev/null)
    echo 1 > \"$old\"; [ -z \"$was_new\" ] || echo 1 > \"$new\"
    ip link set dev \"$1\" address \"$address\"
    echo \"$was_old\" > \"$old\"; [ -z \"$was_new\" ] || echo \"$was_new\" > \"$new\"";

/// Switches an interface off without losing its addresses (`keep_addr_on_down`, for IPv6).
const SWITCH_OFF: &str = "\
    keep=/proc/sys/net/ipv6/conf/$1/keep_addr_on_down
    before=$(cat \"$keep\" 2>/dev/null)
    [ -z \"$before\" ] || echo 1 > \"$keep\"
    ip link set dev \"$1\" down arp on
    [ -z \"$before\" ] || echo \"$before\" > \"$keep\"";

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
