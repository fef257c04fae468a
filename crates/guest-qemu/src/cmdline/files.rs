//! The files that a command line names.

use super::old_style::modern;
use super::options::{Properties, arguments};
use super::restore::disk_places;

/// Options whose value is a file that QEMU boots the guest from.
pub(crate) const BOOTED: [&str; 3] = ["kernel", "initrd", "dtb"];
/// Options that make a character device, in the old style.
pub(super) const DEVICES: [&str; 5] = ["serial", "parallel", "monitor", "qmp", "debugcon"];

/// The paths of disks, character devices and others that a QEMU needs to be started
/// again, as far as they are known.
pub fn file_paths(line: &[String]) -> Vec<String> {
    let disks = disk_places(line).unwrap_or_default();
    // As QEMU tells a protocol from a path (`path_has_protocol` in its block.c).
    let is_file = |path: &String| match (path.find(':'), path.find('/')) {
        (Some(colon), slash) => slash.is_some_and(|slash| slash < colon),
        (None, _) => true,
    };
    let mut found: Vec<String> = disks.into_iter().map(|it| it.path).filter(is_file).collect();
    for argument in arguments(line) {
        let value = argument.value.unwrap_or_default();
        match argument.name {
            name if name == "pidfile" || BOOTED.contains(&name) => found.push(value.to_owned()),
            "chardev" => found.extend(Properties::parse(value).ok().and_then(|it| path_of(&it))),
            name if DEVICES.contains(&name) => {
                let device = value.strip_prefix("mon:").unwrap_or(value);
                found.extend(modern(device).ok().flatten().and_then(|it| path_of(&it)));
            }
            _ => {}
        }
    }
    found
}

fn path_of(device: &Properties) -> Option<String> {
    device.get("path", "").filter(|_| device.switch("abstract") != Some(true))
}
