//! The places of devices on their buses.
//!
//! A device of which the command line tells no place gets the first that is free. Where one
//! before it was unplugged, it would get that one's place in the next QEMU, which then would
//! not take the guest's state. So once a device is gone, the line tells where each of the
//! others on buses of that kind is.
//!
//! A device without a name is known by its number: QEMU makes those of `-device` and
//! `-virtfs` in their order, then those of `-drive if=virtio`, then those of `-device` with
//! JSON (`qemu_create_cli_devices` in system/vl.c).

use super::error::DescribeError;
use super::qom::{NAMED, NAMELESS, get};
use crate::cmdline::{Argument, Properties, arguments};
use crate::qmp::{Qmp, monitor};
use serde_json::Value;

/// A kind of bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bus {
    Scsi,
    Serial,
    Usb,
    /// PCI, and what has no places.
    Other,
}

impl Bus {
    /// That of a device of `-device`.
    fn of(driver: &str) -> Self {
        match driver {
            "virtconsole" | "virtserialport" => Self::Serial,
            "usb-ehci" => Self::Other,
            _ if driver.starts_with("scsi-") => Self::Scsi,
            _ if driver.starts_with("usb-") => Self::Usb,
            _ => Self::Other,
        }
    }

    /// What says where on it a device is.
    fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Scsi => &["channel", "scsi-id", "lun"],
            Self::Serial => &["nr"],
            Self::Usb => &["port"],
            // All PCI devices have the second, and other devices addresses of other kinds.
            Self::Other => &["addr", "multifunction"],
        }
    }
}

/// Places that are free now, since a device of the command line is gone.
#[derive(Debug, Default)]
pub(super) struct VacatedSlots {
    kinds: Vec<Bus>,
    on_the_first_bus: bool,
}

impl VacatedSlots {
    /// Notes the option of a device that is gone, or not where the line had it.
    pub(super) fn note(&mut self, gone: &Argument<'_>) {
        let Some(option) = gone.value.and_then(|value| Properties::parse(value).ok()) else {
            return;
        };
        let kind = Bus::of(&option.get("driver", "driver").unwrap_or_default());
        self.kinds.push(kind);
        let bus = option.get("bus", "");
        let is_first = bus.is_none_or(|bus| ["pci.0", "pcie.0"].contains(&bus.as_str()));
        self.on_the_first_bus |= kind == Bus::Other && is_first;
    }

    /// Adds their places to the devices of `line`, which must all be there, where others
    /// could be theirs now.
    pub(super) fn keep_others(
        &self,
        qmp: &mut Qmp,
        line: &mut [String],
    ) -> Result<(), DescribeError> {
        if self.kinds.is_empty() {
            return Ok(());
        }
        let untold = ["drive", "virtfs"];
        let made =
            arguments(line).into_iter().find(|it| untold.contains(&it.name) && makes(it).is_some());
        if let Some(option) = made.filter(|_| self.on_the_first_bus) {
            let why = format!(
                "a device of its command line was unplugged, and what -{} {} made would get its \
                 place",
                option.name,
                option.value.unwrap_or_default()
            );
            return Err(DescribeError::Unknown(why));
        }
        for (at, path) in devices_of(line) {
            let Ok(mut option) = Properties::parse(&line[at]) else { continue };
            let bus = Bus::of(&option.get("driver", "driver").unwrap_or_default());
            if self.kinds.contains(&bus) {
                add_address(qmp, bus, &path, &mut option)?;
                line[at] = option.to_string();
            }
        }
        Ok(())
    }
}

/// Adds to a device's option where it is, as far as it does not say it.
fn add_address(
    qmp: &mut Qmp,
    bus: Bus,
    path: &str,
    option: &mut Properties,
) -> Result<(), DescribeError> {
    let found = qmp.execute_all("qom-get", bus.keys().iter().map(|key| get(path, key)))?;
    if bus == Bus::Other && found.contains(&Value::Null) {
        return Ok(());
    }
    for (key, value) in bus.keys().iter().zip(found) {
        let value = as_written(qmp, path, key, value)?;
        let text = match &value {
            Value::Null | Value::Bool(_) => continue,
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if option.get(key, "").is_none() {
            option.set(key, &text, value);
        }
    }
    Ok(())
}

/// What QEMU tells of a property of the device at `path`, as people write it.
pub(super) fn as_written(
    qmp: &mut Qmp,
    path: &str,
    property: &str,
    value: Value,
) -> Result<Value, DescribeError> {
    match value {
        // QEMU 8.2 ends where it is given the number in which it tells it.
        Value::Number(place) if property == "addr" => {
            let slot = |place: u64| format!("{:x}.{}", place >> 3, place & 7).into();
            Ok(place.as_u64().map_or(Value::Null, slot))
        }
        Value::String(port) if property == "port" && port.is_empty() => usb_port(qmp, path),
        other => Ok(other),
    }
}

/// The port that a USB device got, of which it does not know itself.
fn usb_port(qmp: &mut Qmp, path: &str) -> Result<Value, DescribeError> {
    let id = path.strip_prefix(NAMED).map_or("", |id| id.trim_start_matches('/'));
    let found = monitor(qmp, "info usb")?;
    told_port(&found, id).map(Value::from).ok_or_else(|| {
        DescribeError::Unknown(format!("it is not known on which port USB device {path} is"))
    })
}

/// Reads lines such as `  Device 0.2, Port 1, Speed 480 Mb/s, Product QEMU USB Tablet, ID: t`.
fn told_port<'t>(found: &'t str, id: &str) -> Option<&'t str> {
    let end = format!(", ID: {id}");
    let line = found.lines().find(|line| !id.is_empty() && line.trim_end().ends_with(&end))?;
    line.split(", ").find_map(|part| part.strip_prefix("Port "))
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
pub(super) fn makes(option: &Argument<'_>) -> Option<u8> {
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
    use super::{devices_of, told_port};

    #[test]
    fn ports_are_told_by_the_device_s_name() {
        let found = "  Device 0.1, Port 1, Speed 480 Mb/s, Product QEMU USB Tablet, ID: t\r\n  \
                    Device 0.0, Port 2.1, Speed 12 Mb/s, Product QEMU USB Keyboard\r\n";
        assert_eq!(told_port(found, "t"), Some("1"));
        assert_eq!(told_port(found, "k"), None);
        assert_eq!(told_port(found, ""), None);
    }

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
