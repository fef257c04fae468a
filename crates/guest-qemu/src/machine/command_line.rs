//! The command line of a guest as it is now: the one that it was started with, less
//! what was unplugged, and with what was plugged in, by QEMU's own word.

use super::bus_addresses::{VacatedSlots, makes};
use super::defaults::keep_defaults;
use super::disks::on_its_snapshots;
use super::ejected_media::without_ejected;
use super::error::DescribeError;
use super::hotplug::{Device, arguments_of, devices, refuse_nameless};
use super::roms::keep_rom_sizes;
use crate::cmdline::{Argument, Properties, arguments};
use crate::qmp::{Qmp, QmpError, monitor};
use serde_json::{Map, Value, json};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// The present form of the `line` that a QEMU was started with in `folder`.
pub(crate) fn current_line(
    qmp: &mut Qmp,
    line: &[String],
    folder: &Path,
) -> Result<Vec<String>, DescribeError> {
    let now = with_plugged(qmp, line)?;
    let now = on_its_snapshots(qmp, folder, now)?;
    let mut now = without_ejected(qmp, now)?;
    keep_rom_sizes(qmp, &mut now)?;
    keep_defaults(qmp, line, &mut now)?;
    Ok(now)
}

/// `line` without what was unplugged, and with what was plugged in.
fn with_plugged(qmp: &mut Qmp, line: &[String]) -> Result<Vec<String>, DescribeError> {
    if arguments(line).iter().any(|argument| argument.name == "readconfig") {
        // What is in that file would count as plugged in.
        let plugged = devices(qmp)?.into_iter().find(|device| device.came_later);
        let refuse = |device: Device| {
            let why = format!("'{}' was plugged in, and -readconfig tells of the rest", device.id);
            Err(DescribeError::Unknown(why))
        };
        return plugged.map_or_else(|| Ok(line.to_vec()), refuse);
    }
    let plugged = devices(qmp)?;
    let (netdevs, nodes) = (netdevs(qmp)?, block_names(qmp)?);
    let there = There { devices: &plugged, netdevs, nodes };
    let mut now = Vec::new();
    let mut known = Vec::new();
    let mut networks = Vec::new();
    let mut nameless = 0;
    let mut freed = VacatedSlots::default();
    for argument in arguments(line) {
        let id = id_of(&argument);
        nameless += usize::from(makes_nameless(&argument, id.is_some()));
        let words = 1 + usize::from(!argument.name.is_empty() && argument.value.is_some());
        if id.as_ref().is_none_or(|(_, id)| there.has(&argument, id)) {
            now.extend_from_slice(&line[argument.at..argument.at + words]);
            known.extend(id);
            if argument.name == "debugcon" {
                // The name that QEMU gives what that makes.
                known.push((Names::Devices, argument.name.to_owned()));
            }
            if argument.name == "device" {
                networks.extend(said_of(&argument, "netdev"));
                there.require_disk(&argument)?;
            }
        } else if argument.name == "device" {
            freed.note(&argument);
        }
    }
    refuse_nameless(qmp, nameless)?;
    freed.keep_others(qmp, &mut now)?;
    let mut added = Vec::new();
    for device in &plugged {
        if !known.contains(&(Names::Devices, device.id.clone())) {
            added.push(arguments_of(qmp, device)?);
        }
    }
    // Another took the place of what the line says of it.
    for name in networks {
        let id = (Names::Netdevs, name);
        if !known.contains(&id) && there.netdevs.iter().any(|(it, _)| *it == id.1) {
            now.extend(netdev(qmp, &id.1, &there)?);
            known.push(id);
        }
    }
    for mut device in hosts_first(added) {
        for (key, names, backend) in [
            ("netdev", Names::Netdevs, netdev as Backend),
            ("drive", Names::Blocks, drive),
            ("iothread", Names::Objects, iothread),
        ] {
            let Some(name) = device.get(key).and_then(Value::as_str) else { continue };
            let id = (names, name.to_owned());
            if !known.contains(&id) {
                now.extend(backend(qmp, name, &there)?);
                known.push(id);
            }
        }
        for (key, names, what) in BACKENDS {
            let Some(name) = device.get(key).and_then(Value::as_str) else { continue };
            if known.contains(&(names, name.to_owned())) {
                continue;
            }
            if key == "rng" {
                // The guest does not see from where its random bytes come.
                device.remove(key);
                continue;
            }
            let why = format!("{what} '{name}' was added to it since");
            return Err(DescribeError::Unknown(why));
        }
        now.extend(["-device".to_owned(), Value::Object(device).to_string()]);
    }
    Ok(now)
}

/// What a device can stand on that only the command line can make again.
const BACKENDS: [(&str, Names, &str); 12] = [
    ("audiodev", Names::Audiodevs, "audio backend"),
    ("canbus", Names::Objects, "object"),
    ("canbus0", Names::Objects, "object"),
    ("canbus1", Names::Objects, "object"),
    ("chardev", Names::Chardevs, "character device"),
    ("chardev1", Names::Chardevs, "character device"),
    ("chardev2", Names::Chardevs, "character device"),
    ("chardev3", Names::Chardevs, "character device"),
    ("chardev4", Names::Chardevs, "character device"),
    ("fsdev", Names::Fsdevs, "file system"),
    ("memdev", Names::Objects, "object"),
    ("rng", Names::Objects, "object"),
];

/// Devices in an order in which each comes after the one whose bus it is on.
fn hosts_first(mut devices: Vec<Map<String, Value>>) -> Vec<Map<String, Value>> {
    let mut ordered = Vec::new();
    while !devices.is_empty() {
        let ids: Vec<String> =
            devices.iter().filter_map(|it| Some(it["id"].as_str()?.to_owned())).collect();
        // A bus is named after its device: `scsi1.0`, or the device itself.
        let waits = |device: &Map<String, Value>| {
            let bus = device.get("bus").and_then(Value::as_str).unwrap_or_default();
            ids.iter()
                .any(|id| bus == id || bus.strip_prefix(id).is_some_and(|it| it.starts_with('.')))
        };
        let (later, now): (Vec<_>, Vec<_>) = devices.into_iter().partition(waits);
        if now.is_empty() {
            // A ring; QEMU will say so.
            ordered.extend(later);
            break;
        }
        ordered.extend(now);
        devices = later;
    }
    ordered
}

type Backend = fn(&mut Qmp, &str, &There<'_>) -> Result<[String; 2], DescribeError>;

/// What QEMU has now, by name.
struct There<'q> {
    devices: &'q [Device],
    /// Network backends, and what is told of them.
    netdevs: Vec<(String, String)>,
    nodes: Vec<String>,
}

impl There<'_> {
    /// Whether what an option made is still there.
    fn has(&self, argument: &Argument<'_>, id: &str) -> bool {
        match argument.name {
            // Of one that came later all is told by QEMU.
            "device" => self.devices.iter().any(|it| it.id == id && !it.came_later),
            "netdev" => {
                self.netdevs.iter().any(|(it, answer)| it == id && is_kind(argument, answer))
            }
            "drive" | "blockdev" => self.nodes.iter().any(|it| it == id),
            _ => true,
        }
    }

    /// That the disk that an option's device stands on was not taken from under it.
    fn require_disk(&self, device: &Argument<'_>) -> Result<(), DescribeError> {
        match said_of(device, "drive").filter(|disk| !self.nodes.contains(disk)) {
            Some(disk) => {
                let why = format!("disk '{disk}' was taken from a device that is still there");
                Err(DescribeError::Unknown(why))
            }
            None => Ok(()),
        }
    }
}

/// Whether what is told of a network backend can be of this option; if not, another of
/// its name came in its place. Of a hub's port what is told is what it leads to.
fn is_kind(option: &Argument<'_>, answer: &str) -> bool {
    let (said, now) = (said_of(option, "ifname"), part_of(answer, "ifname="));
    // `%d` is for the kernel to choose.
    let said = said.filter(|name| !name.contains('%'));
    if said.zip(now).is_some_and(|(said, now)| said != now) {
        return false;
    }
    match (value_of(option, "type").as_deref(), part_of(answer, "type=")) {
        (Some("user"), Some(answer)) => answer != "tap",
        (Some("tap" | "bridge"), Some(answer)) => answer != "user",
        _ => true,
    }
}

/// Whether an option makes a device without a name; `named` is whether it gives one, which
/// of a drive is the drive's own.
fn makes_nameless(option: &Argument<'_>, named: bool) -> bool {
    makes(option).is_some() && !(named && option.name == "device")
}

/// What an option says of `key`, which it may give first and without its name.
fn value_of(option: &Argument<'_>, key: &str) -> Option<String> {
    Properties::parse(option.value?).ok()?.get(key, key)
}

/// What an option says of `key` by its name.
fn said_of(option: &Argument<'_>, key: &str) -> Option<String> {
    Properties::parse(option.value?).ok()?.get(key, "")
}

/// What is told of a network backend under `key`.
fn part_of<'t>(answer: &'t str, key: &str) -> Option<&'t str> {
    answer.split(',').find_map(|part| part.strip_prefix(key))
}

/// What shares its names with nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    Audiodevs,
    Fsdevs,
    Devices,
    Netdevs,
    Blocks,
    Chardevs,
    Objects,
}

/// The name that an option gives.
fn id_of(argument: &Argument<'_>) -> Option<(Names, String)> {
    let options = Properties::parse(argument.value?).ok()?;
    let (names, key) = match argument.name {
        "device" => (Names::Devices, "id"),
        "netdev" => (Names::Netdevs, "id"),
        "drive" => (Names::Blocks, "id"),
        "blockdev" => (Names::Blocks, "node-name"),
        "chardev" => (Names::Chardevs, "id"),
        "object" => (Names::Objects, "id"),
        "audiodev" => (Names::Audiodevs, "id"),
        "fsdev" | "virtfs" => (Names::Fsdevs, "id"),
        _ => return None,
    };
    Some((names, options.get(key, "")?))
}

/// Network backends and what is told of them.
pub(crate) fn netdevs(qmp: &mut Qmp) -> Result<Vec<(String, String)>, QmpError> {
    Ok(told_netdevs(&monitor(qmp, "info network")?))
}

/// Reads lines such as ` \ net0: index=0,type=tap,ifname=tap0,script=no`; the port of a
/// hub comes before what is behind it, or alone: ` \ port0: net0: index=0,type=user`.
fn told_netdevs(answer: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for line in answer.lines() {
        let text = line.trim().trim_start_matches(['\\', ' ']);
        let (names, rest) = text.split_at(text.find("index=").unwrap_or(text.len()));
        let names = names.split(": ").map(|name| name.trim_end_matches(':').trim());
        let names = names.filter(|name| !name.is_empty() && !name.contains(' '));
        found.extend(names.map(|name| (name.to_owned(), rest.to_owned())));
    }
    found
}

/// The names of block nodes and of drives.
fn block_names(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}))?;
    let drives = qmp.execute("query-block", json!({}))?;
    let named = |list: &Value, key: &str| -> Vec<String> {
        let all = list.as_array().into_iter().flatten();
        all.filter_map(|it| Some(it[key].as_str()?.to_owned())).collect()
    };
    Ok([named(&nodes, "node-name"), named(&drives, "device")].concat())
}

fn netdev(_: &mut Qmp, id: &str, there: &There<'_>) -> Result<[String; 2], DescribeError> {
    let all: Vec<&str> = there
        .netdevs
        .iter()
        .filter(|(it, _)| it == id)
        .map(|(_, answer)| answer.as_str())
        .collect();
    let answer = match all[..] {
        [answer] => answer,
        // Each of several queues is told of.
        _ => "",
    };
    let part = |key: &str| part_of(answer, key);
    let options = match part("type=") {
        // Of one that came as a descriptor no name is told.
        Some("tap") if part("ifname=").is_some() => {
            let name = part("ifname=").unwrap_or_default();
            format!("tap,id={id},ifname={name},script=no,downscript=no")
        }
        Some("user") => {
            let net = part("net=").map(|net| format!(",net={net}/24")).unwrap_or_default();
            let restrict = match part("restrict=") {
                Some("y" | "yes" | "on") => ",restrict=on",
                _ => "",
            };
            format!("user,id={id}{net}{restrict}")
        }
        _ => {
            let why = format!("network backend '{id}' was added to it since");
            return Err(DescribeError::Unknown(why));
        }
    };
    Ok(["-netdev".to_owned(), options])
}

fn drive(qmp: &mut Qmp, name: &str, _: &There<'_>) -> Result<[String; 2], DescribeError> {
    if name.starts_with('#') {
        // QEMU's own name, which nobody can give: of a medium that was changed.
        let why = "the medium of a drive that was plugged in was changed; eject it first";
        return Err(DescribeError::Unknown(why.to_owned()));
    }
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}))?;
    let drives = qmp.execute("query-block", json!({}))?;
    let node = nodes.as_array().into_iter().flatten().find(|it| it["node-name"] == name);
    let drive = drives.as_array().into_iter().flatten().find(|it| it["device"] == name);
    let inserted = node.or_else(|| drive.map(|drive| &drive["inserted"])).unwrap_or(&Value::Null);
    let (file, format) = (inserted["file"].as_str(), inserted["drv"].as_str());
    let plain = file.filter(|file| !file.starts_with("json:") && !file.contains("://"));
    let (Some(file), Some(format)) = (plain, format) else {
        return Err(DescribeError::Unknown(format!("disk '{name}' was added to it since")));
    };
    let cache = &inserted["cache"];
    if node.is_none() {
        let (file, direct) = (file.replace(',', ",,"), cache["direct"] == true);
        let read_only = if inserted["ro"] == true { "on" } else { "off" };
        let cache = if direct { "none" } else { "writeback" };
        let options = format!(
            "if=none,id={name},file={file},format={format},readonly={read_only},cache={cache}"
        );
        return Ok(["-drive".to_owned(), options]);
    }
    let mut options = json!({
        "node-name": name, "driver": format, "read-only": inserted["ro"],
        "cache": {"direct": cache["direct"], "no-flush": cache["no-flush"]},
    });
    if ["file", "host_device"].contains(&format) {
        options["filename"] = file.into();
    } else {
        let is_device = fs::metadata(file).is_ok_and(|it| it.file_type().is_block_device());
        let driver = if is_device { "host_device" } else { "file" };
        options["file"] = json!({"driver": driver, "filename": file, "cache": options["cache"]});
    }
    Ok(["-blockdev".to_owned(), options.to_string()])
}

fn iothread(_: &mut Qmp, id: &str, _: &There<'_>) -> Result<[String; 2], DescribeError> {
    Ok(["-object".to_owned(), format!("iothread,id={id}")])
}

#[cfg(test)]
mod tests {
    use super::{is_kind, makes_nameless, told_netdevs};
    use crate::cmdline::arguments;

    #[test]
    fn a_backend_of_another_kind_is_not_the_option_s() {
        let line = ["-netdev", "hubport,id=port0,hubid=0,netdev=net0", "-netdev", "user,id=net0"];
        let line: Vec<String> = line.map(str::to_owned).to_vec();
        let [port, user] = &arguments(&line)[..] else { panic!("{line:?}") };
        assert!(is_kind(port, "index=0,type=user") && is_kind(user, "index=0,type=user"));
        assert!(!is_kind(user, "index=0,type=tap,ifname=t0"));
        let line = ["-netdev", "tap,id=net1,ifname=t0,script=no"].map(str::to_owned);
        let tap = &arguments(&line)[0];
        assert!(is_kind(tap, "index=0,type=tap,ifname=t0,script=no"));
        assert!(!is_kind(tap, "index=0,type=tap,ifname=t1,script=no"));
        for line in [["-netdev", "tap,id=net1"], ["-netdev", "tap,id=net1,ifname=vnet%d"]] {
            let line = line.map(str::to_owned);
            assert!(is_kind(&arguments(&line)[0], "index=0,type=tap,ifname=t0"), "{line:?}");
        }
        assert!(is_kind(port, "index=0,type=tap,ifname=t0"), "what is behind the hub");
    }

    #[test]
    fn options_that_make_nameless_devices_are_known() {
        let makes = |line: [&str; 2]| {
            let line = line.map(str::to_owned);
            let option = &arguments(&line)[0];
            makes_nameless(option, line[1].contains("id="))
        };
        assert!(makes(["-device", "virtio-rng-pci"]) && makes(["-drive", "if=virtio,id=d,file=f"]));
        assert!(!makes(["-device", "virtio-rng-pci,id=r"]) && !makes(["-drive", "if=none,id=d"]));
    }

    #[test]
    fn network_backends_are_told_in_several_ways() {
        let told = "hub 0\n \\ port0: net0: index=0,type=user,net=10.0.2.0\n \\ port1\n\
                    nic.0: index=0,type=nic,model=e1000\n \\ net1: index=0,type=tap,ifname=t0\n";
        let names: Vec<String> = told_netdevs(told).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["port0", "net0", "port1", "nic.0", "net1"]);
        assert_eq!(told_netdevs(told)[4].1, "index=0,type=tap,ifname=t0");
    }
}
