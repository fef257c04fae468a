//! Devices, by QEMU's own word: which there are, which of them were plugged in
//! since it started, and how they are plugged in again.
//!
//! QEMU tells all properties of a device, not which of them somebody set. Those
//! that people set ([`PROPERTIES`]) are given again where they differ from their
//! defaults. What is missed shows when the new QEMU loads the device's state: it
//! refuses one that does not fit. An upgrade then leaves the guest where it is; of a
//! frozen guest or a checkpoint it shows when it is brought back.

use super::current::CurrentError;
use crate::qmp::{Qmp, QmpError};
use serde_json::{Map, Value, json};

/// Where QEMU keeps devices with a name.
const NAMED: &str = "/machine/peripheral";
/// Where it keeps those without: it calls them `device[0]`, `device[1]` and so on.
const NAMELESS: &str = "/machine/peripheral-anon";

/// Properties of devices that people set.
const PROPERTIES: [&str; 105] = [
    "acpi-index",
    "addr",
    "any_layout",
    "ats",
    "bootindex",
    "channel",
    "chardev",
    "chassis",
    "chassis_nr",
    "cmd_per_lun",
    "config-wce",
    "core-id",
    "csum",
    "ctrl_guest_offloads",
    "ctrl_mac_addr",
    "ctrl_rx",
    "ctrl_rx_extra",
    "ctrl_vlan",
    "ctrl_vq",
    "deflate-on-oom",
    "device_id",
    "die-id",
    "disable-legacy",
    "disable-modern",
    "discard",
    "discard_granularity",
    "drive",
    "duplex",
    "event_idx",
    "failover",
    "free-page-hint",
    "free-page-reporting",
    "gso",
    "guest-cid",
    "guest_announce",
    "guest_csum",
    "guest_ecn",
    "guest_tso4",
    "guest_tso6",
    "guest_ufo",
    "guest_uso4",
    "guest_uso6",
    "hash",
    "host_ecn",
    "host_mtu",
    "host_tso4",
    "host_tso6",
    "host_ufo",
    "host_uso",
    "hotplug",
    "indirect_desc",
    "iommu_platform",
    "iothread",
    "logical_block_size",
    "lun",
    "mac",
    "max-bytes",
    "max-discard-sectors",
    "max-write-zeroes-sectors",
    "max_ports",
    "max_sectors",
    "mq",
    "mrg_rxbuf",
    "multifunction",
    "name",
    "netdev",
    "nr",
    "num-queues",
    "num_queues",
    "packed",
    "page-poison",
    "param_change",
    "period",
    "physical_block_size",
    "port",
    "port_wwn",
    "product",
    "queue-size",
    "removable",
    "report-discard-granularity",
    "request-merging",
    "rerror",
    "rombar",
    "romfile",
    "romsize",
    "rotation_rate",
    "rss",
    "rx_queue_size",
    "scsi",
    "scsi-id",
    "seg-max-adjust",
    "serial",
    "share-rw",
    "slot",
    "socket-id",
    "speed",
    "thread-id",
    "tx_queue_size",
    "vectors",
    "vendor",
    "virtqueue_size",
    "werror",
    "write-cache",
    "write-zeroes",
    "wwn",
];

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
pub(super) fn refuse_nameless(qmp: &mut Qmp, given: usize) -> Result<(), CurrentError> {
    let there = children(qmp, NAMELESS)?;
    let came_later = came_later(qmp, NAMELESS, &there)?;
    if let Some(((_, kind), _)) = there.iter().zip(came_later).find(|(_, later)| *later) {
        let why = format!("a device ({kind}) was plugged into it without an id");
        return Err(CurrentError::Unknown(why));
    }
    // They are counted from zero.
    let has = |number: usize| there.iter().any(|(name, _)| *name == format!("device[{number}]"));
    if there.len() < given || !(0..there.len()).all(has) {
        let why = "a device of its command line that has no id was unplugged";
        return Err(CurrentError::Unknown(why.to_owned()));
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
    let told = qmp.execute_all("qom-get", asked)?;
    Ok(told.into_iter().map(|later| later == true).collect())
}

fn get(path: &str, property: &str) -> Value {
    json!({"path": path, "property": property})
}

/// A device that was plugged in, as `-device` takes it.
pub(super) fn arguments_of(
    qmp: &mut Qmp,
    device: &Device,
) -> Result<Map<String, Value>, CurrentError> {
    let Device { id, kind, .. } = device;
    if kind == "usb-host" {
        // Without all that it was asked for with it would take another device of the host.
        let why = format!("'{id}', a USB device of the host, was plugged into it");
        return Err(CurrentError::Unknown(why));
    }
    let path = format!("{NAMED}/{id}");
    let told = qmp.execute("device-list-properties", json!({"typename": kind}))?;
    let about = |name: &&str| told.as_array()?.iter().find(|it| it["name"] == **name);
    let its: Vec<(&str, &Value)> =
        PROPERTIES.iter().filter_map(|name| Some((*name, about(name)?))).collect();
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
        let is_link = about["type"].as_str().is_some_and(|kind| kind.starts_with("link<"));
        let value = match &value {
            Value::String(path) if is_link => last(path).map_or(Value::Null, Value::from),
            // QEMU 8.2 ends where it is given the number in which it tells it.
            Value::Number(place) if name == "addr" => place.as_u64().map_or(Value::Null, slot),
            other => other.clone(),
        };
        let unset = match &value {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
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

/// A place on a PCI bus as people write it: slot and function.
fn slot(place: u64) -> Value {
    format!("{:x}.{}", place >> 3, place & 7).into()
}

/// The last part of a path in QEMU's object tree.
fn last(path: &str) -> Option<&str> {
    path.rsplit('/').next().filter(|name| !name.is_empty())
}
