//! Devices, by QEMU's own word: which there are, which of them were plugged in
//! since it started, and how they are plugged in again.
//!
//! QEMU tells all properties of a device, not which of them its user set. Given again
//! are those that differ from their defaults, and of those whose default it does not
//! tell the ones that users do set ([`WITHOUT_DEFAULTS`]). What an old machine type sets
//! by itself is among them; an older QEMU that does not know of it refuses it before the
//! guest is touched. A device that stands on what cannot be given again is refused.

use super::bus_addresses::as_written;
use super::error::DescribeError;
use super::qom::{NAMED, NAMELESS, get};
use crate::qmp::{Qmp, QmpError};
use serde_json::{Map, Value, json};

/// Properties that people set and of which QEMU tells no default.
const WITHOUT_DEFAULTS: [&str; 25] = [
    "audiodev",
    "bootindex",
    "chardev",
    "chardev1",
    "chardev2",
    "chardev3",
    "chardev4",
    "device_id",
    "display",
    "drive",
    "duplex",
    "failover_pair_id",
    "fsdev",
    "mac",
    "masterbus",
    "name",
    "netdev",
    "pcap",
    "port",
    "product",
    "romfile",
    "serial",
    "tx",
    "vendor",
    "ver",
];
/// What a device finds out when nobody says it: the class of a PCI device, a disk's geometry.
const FOUND_OUT: [&str; 4] = ["class", "cyls", "heads", "secs"];
/// What tells a CPU from another; all else of it the command line says.
const OF_CPUS: [&str; 5] = ["core-id", "die-id", "node-id", "socket-id", "thread-id"];
/// Devices that nobody could make again: of which device of the host, or on which drive, QEMU
/// does not tell.
const UNKNOWABLE: [&str; 2] = ["usb-host", "usb-storage"];
/// Where QEMU keeps what `-object` and `object-add` make.
const OBJECTS: &str = "/objects/";

/// Whether a property is for machine types of other versions rather than for people.
fn is_internal(name: &str) -> bool {
    name.starts_with("x-") || name.starts_with("migrate-")
}

/// Whether a property, of which QEMU tells this, may have to be given again to a device.
fn may_be_given(about: &Value, is_cpu: bool) -> bool {
    let name = about["name"].as_str().unwrap_or_default();
    if is_cpu {
        return OF_CPUS.contains(&name);
    }
    if about["type"].as_str().is_some_and(|kind| kind.starts_with("child<")) {
        return false;
    }
    is_link(about)
        || WITHOUT_DEFAULTS.contains(&name)
        || (about.get("default-value").is_some()
            && !is_internal(name)
            && !FOUND_OUT.contains(&name))
        || is_list(about)
}

/// Whether a property names another object.
fn is_link(about: &Value) -> bool {
    about["type"].as_str().is_some_and(|kind| kind.starts_with("link<"))
}

/// Whether it has a list of values.
fn is_list(about: &Value) -> bool {
    about["type"].as_str().is_some_and(|kind| kind.ends_with("List"))
}

/// A device with a name.
pub(super) struct Device {
    pub(super) id: String,
    pub(super) kind: String,
    /// Whether it came after QEMU had started: then what the command line says of
    /// its name, if it does, is of one that was unplugged.
    pub(super) came_later: bool,
}

/// Devices with a name.
pub(super) fn devices(qmp: &mut Qmp) -> Result<Vec<Device>, QmpError> {
    let all = children(qmp, NAMED)?;
    let came_later = came_later(qmp, NAMED, &all)?;
    let device = |((id, kind), came_later)| Device { id, kind, came_later };
    Ok(all.into_iter().zip(came_later).map(device).collect())
}

/// Refuses a guest whose devices without a name are others than those that its command
/// line makes: nobody could say how to plug them in again. Of these `given` are known; there
/// may be options that make more.
pub(super) fn refuse_nameless(qmp: &mut Qmp, given: usize) -> Result<(), DescribeError> {
    let there = children(qmp, NAMELESS)?;
    let came_later = came_later(qmp, NAMELESS, &there)?;
    if let Some(((_, kind), _)) = there.iter().zip(came_later).find(|(_, later)| *later) {
        let why = format!("a device ({kind}) was plugged into it without an id");
        return Err(DescribeError::Unknown(why));
    }
    // They are counted from zero.
    let has = |number: usize| there.iter().any(|(name, _)| *name == format!("device[{number}]"));
    if there.len() < given || !(0..there.len()).all(has) {
        let why = "a device of its command line that has no id was unplugged";
        return Err(DescribeError::Unknown(why.to_owned()));
    }
    Ok(())
}

/// What is below a path, and its kind.
fn children(qmp: &mut Qmp, path: &str) -> Result<Vec<(String, String)>, QmpError> {
    let all = qmp.execute("qom-list", json!({"path": path}))?;
    let child = |entry: &Value| {
        let kind = entry["type"].as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
        Some((entry["name"].as_str()?.to_owned(), kind.to_owned()))
    };
    Ok(all.as_array().into_iter().flatten().filter_map(child).collect())
}

/// Which of the devices at a place were plugged in when QEMU had started.
fn came_later(
    qmp: &mut Qmp,
    place: &str,
    devices: &[(String, String)],
) -> Result<Vec<bool>, QmpError> {
    let path = |name: &String| format!("{place}/{name}");
    let asked = devices.iter().map(|(name, _)| get(&path(name), "hotplugged"));
    let answer = qmp.execute_all("qom-get", asked)?;
    Ok(answer.into_iter().map(|later| later == true).collect())
}

/// A device that was plugged in, as `-device` takes it.
pub(super) fn arguments_of(
    qmp: &mut Qmp,
    device: &Device,
) -> Result<Map<String, Value>, DescribeError> {
    let Device { id, kind, .. } = device;
    if UNKNOWABLE.contains(&kind.as_str()) {
        let why = format!("'{id}' ({kind}) was plugged into it");
        return Err(DescribeError::Unknown(why));
    }
    let path = format!("{NAMED}/{id}");
    let answer = qmp.execute("device-list-properties", json!({"typename": kind}))?;
    let is_cpu = kind.ends_with("-cpu");
    let its: Vec<(&str, &Value)> = answer
        .as_array()
        .into_iter()
        .flatten()
        .filter(|about| may_be_given(about, is_cpu))
        .filter_map(|about| Some((about["name"].as_str()?, about)))
        .collect();
    let asked = ["parent_bus"].into_iter().chain(its.iter().map(|(name, _)| *name));
    let mut values =
        qmp.execute_all("qom-get", asked.map(|property| get(&path, property)))?.into_iter();
    let mut device = Map::new();
    device.insert("driver".to_owned(), kind.clone().into());
    device.insert("id".to_owned(), id.clone().into());
    if let Some(bus) = values.next().unwrap_or_default().as_str().and_then(last) {
        device.insert("bus".to_owned(), bus.into());
    }
    for ((name, about), value) in its.into_iter().zip(values) {
        let value = match value {
            // What is elsewhere is the device's own, or the machine's.
            Value::String(path) if is_link(about) => {
                let other = path.strip_prefix(NAMED).and_then(|it| it.strip_prefix('/'));
                let other = other.filter(|other| other != id);
                path.strip_prefix(OBJECTS).or(other).map_or(Value::Null, Value::from)
            }
            Value::Array(list) if !list.is_empty() => {
                let why = format!("'{id}' was plugged into it with {name}=, a list");
                return Err(DescribeError::Unknown(why));
            }
            other => as_written(qmp, &path, name, other)?,
        };
        let unset = match &value {
            Value::Null => true,
            // Without a file there is no ROM; what nobody named is told by its name.
            Value::String(text) => text.is_empty() && name != "romfile",
            Value::Number(number) => number.as_i64().is_some_and(|it| it < 0),
            Value::Array(_) | Value::Object(_) => true,
            Value::Bool(_) => false,
        };
        if !unset && about["default-value"] != value {
            device.insert(name.to_owned(), value);
        }
    }
    Ok(device)
}

/// The last part of a path in QEMU's object tree.
fn last(path: &str) -> Option<&str> {
    path.rsplit('/').next().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::may_be_given;
    use serde_json::json;

    #[test]
    fn what_people_set_is_given_and_what_qemu_finds_out_is_not() {
        let may = |about| may_be_given(&about, false);
        assert!(may(json!({"name": "subsys", "type": "uint16", "default-value": 0})));
        assert!(may(json!({"name": "serial", "type": "str"})));
        assert!(may(json!({"name": "rng", "type": "link<rng-backend>"})));
        assert!(!may(json!({"name": "serial", "type": "child<serial>"})));
        assert!(!may(json!({"name": "cyls", "type": "uint32", "default-value": 0})));
        assert!(!may(json!({"name": "x-ats", "type": "bool", "default-value": true})));
        assert!(!may(json!({"name": "guest-stats", "type": "guest statistics"})));
        let of_cpu = |name: &str| may_be_given(&json!({"name": name, "default-value": 1}), true);
        assert!(of_cpu("core-id") && !of_cpu("level"));
    }
}
