//! The sizes of option ROMs.
//!
//! A device's ROM comes from a file of the QEMU that starts; its content then comes with
//! the guest's state, but QEMU refuses a state whose ROM has another size ("Size
//! mismatch: ...rom"). Distributions ship network ROMs of 256 and of 512 KiB, and packages
//! change. So a guest keeps the sizes that it has: `-global KIND.romsize=BYTES` (QEMU
//! 5.2; `pci_add_option_rom` in hw/pci/pci.c). A file that is larger than that is not
//! looked at by QEMU 10.0 where a state comes in; 7.2 refuses it as it starts, before the
//! guest is touched. What is plugged in later is held to it as well.

use crate::qmp::{Qmp, QmpError};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Where QEMU has devices: those with a name, those without, and its own.
const PLACES: [&str; 3] = ["/machine/peripheral", "/machine/peripheral-anon", OWN];
const OWN: &str = "/machine/unattached";
/// What every PC has on no PCI bus.
const NEVER_PCI: [&str; 14] = [
    "System",
    "fw_cfg_io",
    "hpet",
    "i8042",
    "i8257",
    "ioapic",
    "mc146818rtc",
    "port92",
    "smbus-eeprom",
    "virtio-net-device",
    "virtserialport",
    "vmgenid",
    "vmmouse",
    "vmport",
];
/// `romsize` of a device that has none.
const NO_ROM: u64 = u32::MAX as u64;

/// Adds to `line` the sizes of the ROMs that a guest has, as far as it does not say them.
pub(super) fn keep_rom_sizes(qmp: &mut Qmp, line: &mut Vec<String>) -> Result<(), QmpError> {
    for (kind, sizes) in rom_sizes(qmp)? {
        // Where devices of one kind differ their line says why, by `romfile=` or `romsize=`.
        let [size] = sizes[..] else { continue };
        let option = format!("{kind}.romsize={size}");
        let said = format!("{kind}.romsize=");
        // The last one counts.
        let last = line.windows(2).rfind(|it| it[0] == "-global" && it[1].starts_with(&said));
        if last.is_none_or(|words| words[1] != option) {
            line.extend(["-global".to_owned(), option]);
        }
    }
    Ok(())
}

/// The kinds of devices that have ROMs, and all sizes of them.
fn rom_sizes(qmp: &mut Qmp) -> Result<BTreeMap<String, Vec<u64>>, QmpError> {
    let all = qmp.execute_all("qom-list", PLACES.map(|path| json!({"path": path})))?;
    let mut devices = Vec::new();
    for (place, children) in PLACES.iter().zip(&all) {
        for child in children.as_array().into_iter().flatten() {
            let (Some(name), Some(kind)) = (child["name"].as_str(), kind(child)) else { continue };
            if !is_never_pci(kind) && !qmp.has_no_rom(kind) {
                devices.push((kind.to_owned(), format!("{place}/{name}")));
            }
        }
    }
    let get = |(_, path): &(String, String)| json!({"path": path, "property": "romsize"});
    let sizes = qmp.execute_all("qom-get", devices.iter().map(get))?;
    let mut found = BTreeMap::<String, Vec<u64>>::new();
    for ((kind, _), size) in devices.into_iter().zip(sizes) {
        let Some(size) = size.as_u64() else {
            qmp.note_no_rom(&kind);
            continue;
        };
        let sizes = found.entry(kind).or_default();
        if size != NO_ROM && !sizes.contains(&size) {
            sizes.push(size);
        }
    }
    Ok(found)
}

/// Whether devices of a kind, of those that every PC has, are on no PCI bus: only there are
/// ROMs. Of others QEMU is asked. (Its list of the kinds that are, it cannot give without
/// loading all its modules.)
fn is_never_pci(kind: &str) -> bool {
    kind.starts_with("isa-")
        || kind.starts_with("kvm")
        || kind.ends_with("-cpu")
        || NEVER_PCI.contains(&kind)
}

/// The kinds of QEMU's own devices.
pub(super) fn unattached_kinds(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    let children = ask(qmp, "qom-list", json!({"path": OWN}))?;
    Ok(children.as_array().into_iter().flatten().filter_map(kind).map(str::to_owned).collect())
}

/// What QEMU answers; nothing where it has no such thing.
fn ask(qmp: &mut Qmp, command: &str, arguments: Value) -> Result<Value, QmpError> {
    match qmp.execute(command, arguments) {
        Err(QmpError::Refused { .. }) => Ok(Value::Null),
        other => other,
    }
}

/// What a child of the object tree is, where it may be a device.
fn kind(child: &Value) -> Option<&str> {
    let kind = child["type"].as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
    let is_other = kind.contains(':') || ["irq", "memory-region", "container"].contains(&kind);
    (!is_other).then_some(kind)
}
