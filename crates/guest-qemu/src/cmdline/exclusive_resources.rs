//! The command line of a QEMU that takes over a guest: what only one process
//! can have, and what must not be begun anew.
//!
//! Beside a QEMU that still runs (`docs/hand-over.md` has the table):
//!
//! - taps and listening sockets of TCP are its very own, by descriptor;
//! - unix sockets and pid files are made aside, and renamed into their places
//!   when the guest has moved;
//! - forwarded ports, VNC's port and the debugger's are left out, and opened
//!   when the other has let go of them.
//!
//! In any case logs are appended to, QEMU does not wait for clients (`wait=off`), and the guest is
//! neither held at its start nor set back to a snapshot. Descriptors that QEMU was given by its parent
//! stay as they are if the QEMU before is gone: the process that starts the next may hand it the same.

mod vnc;

use super::old_style::modern;
use super::options::{Argument, Properties, Unsupported, arguments};
use super::truncated::truncated;
use dewar_registry::Descriptors;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Ends of names for what is to be renamed.
pub(crate) const ASIDE: [&str; 2] = ["~", "~2"];
/// What the address of a unix socket has room for (`sun_path` in unix(7)).
const SOCKET_PATH_BYTES: usize = 107;
/// Where `-s` listens.
const GDB: &str = "tcp::1234";
const USER_NETWORK: &str = "open connections through user-mode networking end";
/// Network backends that need nothing.
const FREE_NETDEVS: [&str; 3] = ["none", "nic", "hubport"];
const ADD_FD: &str = "its descriptors came from another and are known to QEMU alone";
/// Options with which no second QEMU can be started, and why.
const REFUSED: [(&str, &str); 3] = [
    (
        "readconfig",
        "what its file holds is not known; 'dewar freeze', then 'dewar thaw' do without",
    ),
    (
        "spice",
        "its ports cannot be handed over; 'dewar freeze', then 'dewar thaw' replace QEMU, too, and \
         cut off who looks at its display",
    ),
    (
        "tpmdev",
        "its emulator serves one QEMU only; 'dewar freeze', start the emulator again, then 'dewar \
         thaw': the guest's TPM stays as it was",
    ),
];
const REFUSED_DEVICES: [(&str, &str); 2] = [
    ("usb-host", "the host's device serves one QEMU only"),
    ("vhost-vsock", "its context id belongs to one QEMU only"),
];

/// Where a socket listens for TCP connections, as QEMU was told.
#[derive(Debug, Clone, Copy)]
pub struct Listening<'h> {
    /// A name, an address, or nothing for all addresses.
    pub host: &'h str,
    /// The port.
    pub port: u16,
    /// Whether it may be of this family; where nothing is said of either, of both.
    pub ipv4: Option<bool>,
    /// The same.
    pub ipv6: Option<bool>,
}

/// The files of a QEMU that can be taken over. Each answer is the number that
/// the file has in the process that takes it over.
pub trait Holder {
    /// A socket that listens there.
    fn listener(&mut self, at: &Listening<'_>) -> Option<i32>;
    /// All queues of the tap of network backend `id`, or with this name.
    fn tap(&mut self, id: Option<&str>, name: Option<&str>) -> Vec<i32>;
    /// The file that has this number there.
    fn number(&mut self, fd: i32) -> Option<i32>;
}

/// A file that is made under another name and gets its own later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rename {
    /// Where it is made.
    pub aside: PathBuf,
    /// Where it belongs.
    pub own: PathBuf,
}

/// What the new QEMU is told when the old one has let go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Later {
    /// A command of the monitor for people.
    Monitor(String),
    /// Addresses that VNC shall listen on, as QMP's `display-update` takes them.
    Vnc(Value),
}

/// A command line and what belongs to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TakeoverPlan {
    /// The arguments.
    pub line: Vec<String>,
    /// What is to be renamed when the guest has moved.
    pub renames: Vec<Rename>,
    /// What is to be opened then.
    pub later: Vec<Later>,
    /// What its users will lose, each a sentence.
    pub losses: Vec<String>,
    /// The descriptors that options have now whose own words do not say it.
    pub descriptors: Descriptors,
}

/// Plans the command line of a QEMU that takes over from the one that was
/// started with `line` in `folder`: beside it, with its files from `holder`,
/// or when it is gone. `scratch` is a folder for sockets that nobody else
/// needs.
///
/// # Errors
/// Where something cannot be handed over.
pub fn take_over<'a>(
    line: &[String],
    folder: &'a Path,
    scratch: &'a Path,
    holder: Option<&'a mut dyn Holder>,
    present: &'a Descriptors,
) -> Result<TakeoverPlan, Unsupported> {
    let result = TakeoverPlan::default();
    let mut rewriter = Rewriter { folder, scratch, holder, present, result, made: 0 };
    rewriter.default_network(line);
    for argument in arguments(line) {
        let words = &line[argument.at..=argument.at + usize::from(has_value(&argument))];
        let changed = rewriter.option(&argument, words)?;
        rewriter.result.line.extend(changed);
    }
    Ok(rewriter.result)
}

/// Whether its value is a word of its own.
fn has_value(argument: &Argument<'_>) -> bool {
    !argument.name.is_empty() && argument.value.is_some()
}

struct Rewriter<'a> {
    folder: &'a Path,
    scratch: &'a Path,
    holder: Option<&'a mut dyn Holder>,
    present: &'a Descriptors,
    result: TakeoverPlan,
    /// Character devices made so far.
    made: usize,
}

impl Rewriter<'_> {
    /// The words that take the place of an option.
    fn option(
        &mut self,
        argument: &Argument<'_>,
        words: &[String],
    ) -> Result<Vec<String>, Unsupported> {
        let value = argument.value.unwrap_or_default();
        let option = words[0].clone();
        let beside = self.holder.is_some();
        let with = |value: String| Ok(vec![option.clone(), value]);
        if let Some((option, _)) = truncated(argument).filter(|_| beside) {
            return Err(Unsupported(format!("{option}: it would truncate its file")));
        }
        match argument.name {
            "S" | "mem-prealloc" => Ok(Vec::new()),
            // It was started so; its state comes from elsewhere now.
            "loadvm" | "incoming" => Ok(Vec::new()),
            "object" => {
                let object = Properties::parse(value)?;
                with(without_prealloc(object, value))
            }
            "chardev" => {
                let mut device = Properties::parse(value)?;
                self.chardev(&mut device, value)?;
                with(device.to_string())
            }
            "serial" | "parallel" | "monitor" | "qmp" | "qmp-pretty" | "debugcon" => {
                self.old_style(&option, value, words)
            }
            "netdev" | "nic" | "net" => {
                let mut netdev = Properties::parse(value)?;
                self.netdev(&mut netdev, value)?;
                with(netdev.to_string())
            }
            name if beside => match name {
                "add-fd" => Err(Unsupported(format!("-add-fd: {ADD_FD}"))),
                "pidfile" => with(self.aside(value)?),
                "vnc" => with(self.vnc(value)?),
                "display" if value.starts_with("vnc=") => {
                    let vnc = self.vnc(value.trim_start_matches("vnc="))?;
                    Ok(vec!["-vnc".to_owned(), vnc])
                }
                "s" | "gdb" => {
                    let address = if name == "s" { GDB } else { value };
                    self.later(Later::Monitor(format!("gdbserver {address}")));
                    Ok(Vec::new())
                }
                "device" => {
                    let kind = Properties::parse(value)?.get("driver", "driver");
                    let kind = kind.unwrap_or_default();
                    let refused = REFUSED_DEVICES.iter().find(|(it, _)| kind.starts_with(it));
                    refused.map_or(Ok(words.to_vec()), |(_, why)| {
                        Err(Unsupported(format!("-device {kind}: {why}")))
                    })
                }
                name => match REFUSED.iter().find(|(it, _)| *it == name) {
                    Some((_, why)) => Err(Unsupported(format!("-{name}: {why}"))),
                    None => Ok(words.to_vec()),
                },
            },
            _ => Ok(words.to_vec()),
        }
    }

    fn later(&mut self, what: Later) {
        self.result.later.push(what);
    }

    /// Another name for a file that is to be renamed. By the first one the guest may have it
    /// still, where the last hand-over could not rename it.
    fn aside(&mut self, path: &str) -> Result<String, Unsupported> {
        let names = ASIDE.map(|end| format!("{path}{end}"));
        let Some(aside) = names.into_iter().find(|it| !self.folder.join(it).exists()) else {
            return Err(Unsupported(format!("{path}~ is in the way: remove it")));
        };
        if aside.len() > SOCKET_PATH_BYTES {
            return Err(Unsupported(format!(
                "the path {path} is too long: there is no room for {aside}"
            )));
        }
        let (aside_path, own) = (self.folder.join(&aside), self.folder.join(path));
        self.result.renames.push(Rename { aside: aside_path, own });
        Ok(aside)
    }

    /// Descriptors that are known by their numbers: `numbers` where the option says
    /// them, or what they are by now. Returns those that they get.
    fn numbered(&mut self, option: &str, numbers: &str) -> Result<Vec<i32>, Unsupported> {
        let gone = || Unsupported(format!("'{option}': its descriptors came from another"));
        let now = self.present.get(option).map_or(numbers, String::as_str);
        let holder = self.holder.as_mut().ok_or_else(gone)?;
        let taken: Option<Vec<i32>> =
            now.split(':').map(|number| holder.number(number.parse().ok()?)).collect();
        taken.ok_or_else(gone)
    }

    /// Notes which descriptors an option has from now on.
    fn note(&mut self, option: &str, fds: &[i32]) -> String {
        let text = fds.iter().map(i32::to_string).collect::<Vec<_>>().join(":");
        self.result.descriptors.insert(option.to_owned(), text.clone());
        text
    }

    /// Where no network is named, QEMU makes one.
    fn default_network(&mut self, line: &[String]) {
        let named = ["netdev", "nic", "net", "nodefaults"];
        if self.holder.is_some() && !arguments(line).iter().any(|it| named.contains(&it.name)) {
            self.result.losses.push(USER_NETWORK.to_owned());
        }
    }

    fn chardev(&mut self, device: &mut Properties, option: &str) -> Result<(), Unsupported> {
        let kind = device.get("backend", "backend").unwrap_or_default();
        let id = device.get("id", "").unwrap_or_default();
        if device.get("logfile", "").is_some() {
            device.set_switch("logappend", true);
        }
        match kind.as_str() {
            "file" => device.set_switch("append", true),
            "pty" => self.result.losses.push(format!("the terminal of '{id}' gets another path")),
            "udp" if self.holder.is_some() && device.get("localport", "").is_some() => {
                return Err(Unsupported(format!("-chardev udp,id={id}: its port is taken")));
            }
            "socket" if device.switch("server") == Some(true) => {
                device.set_switch("wait", false);
                self.server(&id, device, option)?;
            }
            "socket" if self.holder.is_some() && device.get("fd", "").is_some() => {
                return Err(Unsupported(format!("-chardev socket,id={id}: its peer serves one")));
            }
            "socket" if self.holder.is_some() => {
                let who = if option.is_empty() { &id } else { option };
                self.result.losses.push(format!("'{who}' connects to its server anew"));
            }
            "pipe" | "serial" | "tty" | "parallel" | "parport" if self.holder.is_some() => {
                return Err(Unsupported(format!("-chardev {kind},id={id}: two would read it")));
            }
            _ => {}
        }
        Ok(())
    }

    fn server(
        &mut self,
        id: &str,
        device: &mut Properties,
        option: &str,
    ) -> Result<(), Unsupported> {
        if self.holder.is_none() {
            return Ok(());
        }
        if let Some(number) = device.get("fd", "") {
            let fds = self.numbered(option, &number)?;
            let text = self.note(option, &fds);
            set_text(device, "fd", &text);
        }
        if let Some(path) = device.get("path", "") {
            if device.switch("abstract") == Some(true) {
                return Err(Unsupported(format!("-chardev socket,id={id}: an abstract address")));
            }
            let aside = self.aside(&path)?;
            set_text(device, "path", &aside);
        } else if let Some(port) = device.get("port", "") {
            let host = device.get("host", "").unwrap_or_default();
            let (ipv4, ipv6) = (device.switch("ipv4"), device.switch("ipv6"));
            let number = port.parse().ok();
            let at = number.map(|port| Listening { host: &host, port, ipv4, ipv6 });
            let found = at.and_then(|at| self.holder.as_mut()?.listener(&at));
            let fd = found
                .ok_or_else(|| Unsupported(format!("nobody listens on port {port} of '{id}'")))?;
            for key in ["host", "port", "to", "ipv4", "ipv6"] {
                device.remove(key);
            }
            set_text(device, "fd", &fd.to_string());
        }
        Ok(())
    }

    /// An option whose value is a character device in the old style
    /// (`qemu_chr_parse_compat` in QEMU's chardev/char.c).
    fn old_style(
        &mut self,
        option: &str,
        value: &str,
        words: &[String],
    ) -> Result<Vec<String>, Unsupported> {
        let (monitored, rest) = match value.strip_prefix("mon:") {
            Some(rest) => (true, rest),
            None => (false, value),
        };
        if self.holder.is_some() && rest.starts_with("udp:") && rest.contains('@') {
            return Err(Unsupported(format!("{value}: its port is taken")));
        }
        if self.holder.is_some() && (rest.starts_with("pipe:") || rest.starts_with("/dev/")) {
            return Err(Unsupported(format!("{value}: two would read it")));
        }
        let Some(mut device) = modern(rest)? else { return Ok(words.to_vec()) };
        let id = format!("dewar-c{}", self.made);
        self.made += 1;
        set_text(&mut device, "id", &id);
        self.chardev(&mut device, value)?;
        let mut words = vec!["-chardev".to_owned()];
        if monitored {
            device.set_switch("mux", true);
            words.extend([device.to_string(), "-mon".to_owned()]);
            words.push(format!("chardev={id},mode=readline"));
        } else {
            words.push(device.to_string());
        }
        words.extend([option.to_owned(), format!("chardev:{id}")]);
        Ok(words)
    }

    fn netdev(&mut self, netdev: &mut Properties, option: &str) -> Result<(), Unsupported> {
        let kind = netdev.get("type", "type").unwrap_or_default();
        match (kind.as_str(), self.holder.is_some()) {
            (_, false) => Ok(()),
            ("user", true) => {
                netdev.remove("hostfwd");
                self.result.losses.push(USER_NETWORK.to_owned());
                Ok(())
            }
            ("tap" | "bridge", true) => self.tap(netdev, option),
            (kind, true) if FREE_NETDEVS.contains(&kind) => Ok(()),
            (kind, true) => {
                Err(Unsupported(format!("-netdev {kind}: its connection cannot be handed over")))
            }
        }
    }

    fn tap(&mut self, netdev: &mut Properties, option: &str) -> Result<(), Unsupported> {
        let (id, name) = (netdev.get("id", ""), netdev.get("ifname", ""));
        let given = netdev.get("fds", "").or_else(|| netdev.get("fd", ""));
        let given = given.or_else(|| self.present.get(option).cloned());
        let fds = match (given, &mut self.holder) {
            (Some(numbers), _) => self.numbered(option, &numbers)?,
            (None, Some(holder)) => holder.tap(id.as_deref(), name.as_deref()),
            (None, None) => Vec::new(),
        };
        if fds.is_empty() {
            let which = id.or(name).unwrap_or_default();
            return Err(Unsupported(format!("the tap of network backend '{which}' is not found")));
        }
        if netdev.get("vhostfd", "").or_else(|| netdev.get("vhostfds", "")).is_some() {
            netdev.set_switch("vhost", true);
        }
        let all = ["ifname", "script", "downscript", "helper", "br", "queues", "fd", "fds"];
        for key in all.into_iter().chain(["vhostfd", "vhostfds"]) {
            netdev.remove(key);
        }
        netdev.set_implied("type", "tap");
        let numbers = self.note(option, &fds);
        set_text(netdev, if fds.len() == 1 { "fd" } else { "fds" }, &numbers);
        Ok(())
    }
}

/// A memory backend whose pages are not all touched at the start: they have
/// their content, and another QEMU may be writing it.
fn without_prealloc(mut object: Properties, value: &str) -> String {
    let kind = object.get("qom-type", "qom-type").unwrap_or_default();
    if !kind.starts_with("memory-backend-") {
        return value.to_owned();
    }
    object.remove("prealloc");
    // A QEMU that ends would throw away what another one runs on.
    object.remove("discard-data");
    object.to_string()
}

/// The first option that names descriptors of the process: they end with it, unless the
/// process that starts the next hands it the same.
pub fn inherited(line: &[String]) -> Option<String> {
    let names_fds = |argument: &Argument<'_>| match argument.name {
        "add-fd" => true,
        "chardev" | "netdev" | "nic" | "net" => {
            let options = Properties::parse(argument.value.unwrap_or_default());
            options.is_ok_and(|it| ["fd", "fds"].iter().any(|key| it.get(key, "").is_some()))
        }
        _ => false,
    };
    arguments(line).iter().find(|it| names_fds(it)).map(|it| it.name.to_owned())
}

fn set_text(options: &mut Properties, key: &str, value: &str) {
    options.set(key, value, Value::from(value));
}
