//! The places of devices on their buses.
//!
//! A device of which the command line tells no place gets the first that is free. Where one
//! before it was unplugged, it would get that one's place in the next QEMU, which then would
//! not take the guest's state. So once a device is gone, the line tells where each of the
//! others is.
//!
//! A device without a name is known by its number: QEMU makes those of `-device` and
//! `-virtfs` in their order, then those of `-drive if=virtio`, then those of `-device` with
//! JSON (`qemu_create_cli_devices` in system/vl.c).

use super::plugged::{NAMED, NAMELESS, get, slot};
use crate::cmdline::{Argument, Properties, arguments};
use crate::qmp::{Qmp, QmpError};
use serde_json::Value;

/// What says where on its bus a device is: PCI, SCSI, virtio-serial, USB.
const PLACES: [&str; 6] = ["addr", "channel", "lun", "nr", "port", "scsi-id"];

/// Adds their places to the devices of `line`, which must all be there.
pub(super) fn keep_places(qmp: &mut Qmp, line: &mut [String]) -> Result<(), QmpError> {
    for (at, path) in devices_of(line) {
        let Ok(mut option) = Properties::parse(&line[at]) else { continue };
        let asked = ["type"].iter().chain(&PLACES).map(|key| get(&path, key));
        let mut told = qmp.execute_all("qom-get", asked)?.into_iter();
        let kind = told.next().unwrap_or_default();
        let driver = option.get("driver", "driver").unwrap_or_default();
        // `virtio-net` is `virtio-net-pci`.
        if !kind.as_str().is_some_and(|kind| kind.starts_with(&driver)) {
            continue;
        }
        for (key, value) in PLACES.iter().zip(told) {
            let value = match &value {
                Value::Number(place) if *key == "addr" => place.as_u64().map_or(Value::Null, slot),
                Value::Number(place) if place.as_u64().is_none() => Value::Null,
                other => other.clone(),
            };
            let text = match &value {
                Value::Null => continue,
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            if option.get(key, "").is_none() {
                option.set(key, &text, value);
            }
        }
        line[at] = option.to_string();
    }
    Ok(())
}

/// Where the values of `-device` options stand, and where QEMU keeps what they made.
fn devices_of(line: &[String]) -> Vec<(usize, String)> {
    let all = arguments(line);
    let mut order: Vec<&Argument<'_>> = all.iter().filter(|it| makes(it).is_some()).collect();
    order.sort_by_key(|it| makes(it));
    let mut nameless = 0;
    let mut found = Vec::new();
    for argument in order {
        let value = argument.value.unwrap_or_default();
        let id = Properties::parse(value).ok().and_then(|it| it.get("id", ""));
        let path = match id.filter(|_| argument.name == "device") {
            Some(id) => format!("{NAMED}/{id}"),
            None => {
                nameless += 1;
                format!("{NAMELESS}/device[{}]", nameless - 1)
            }
        };
        if argument.name == "device" {
            found.push((argument.at + 1, path));
        }
    }
    found
}

/// When QEMU makes the device of an option that makes one.
fn makes(option: &Argument<'_>) -> Option<u8> {
    let value = option.value?;
    match option.name {
        "device" => Some(if value.trim_start().starts_with('{') { 2 } else { 0 }),
        "virtfs" => Some(0),
        "drive" => {
            let kind = Properties::parse(value).ok()?.get("if", "");
            (kind.as_deref() == Some("virtio")).then_some(1)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::devices_of;

    #[test]
    fn devices_without_a_name_are_numbered_as_qemu_makes_them() {
        let line = [
            "-device",
            "{\"driver\": \"virtio-rng-pci\"}",
            "-drive",
            "if=virtio,file=f",
            "-device",
            "e1000",
            "-device",
            "scsi-hd,id=s",
        ];
        let line = line.map(str::to_owned);
        let named = |it: &str| format!("/machine/peripheral{it}");
        let found =
            [(5, named("-anon/device[0]")), (7, named("/s")), (1, named("-anon/device[2]"))];
        assert_eq!(devices_of(&line), found);
    }
}
