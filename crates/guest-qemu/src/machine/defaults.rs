//! Devices that QEMU adds by itself, kept as they are.
//!
//! QEMU adds a display adapter, a CD-ROM drive and a network card to a machine, unless the command line asks
//! for one already (`default_list` and `default_net` in system/vl.c). An option for that kind of device counts
//! as asking, and so does any `-device` or `-global` that names such a kind.
//!
//! QEMU refuses a saved state whose devices differ. So when Dewar adds words to a command line, or removes
//! some, the set of these devices must not change:
//!
//! - Where the change would take one away, Dewar asks for it by name.
//! - Where the change would add one that the guest does not have, Dewar keeps QEMU from adding it.

use super::roms::unattached_kinds;
use crate::cmdline::{Properties, arguments};
use crate::qmp::{Qmp, QmpError};
use serde_json::json;

/// Kinds of display adapters, and how `-vga` calls those that QEMU makes by itself.
const DISPLAYS: [(&str, &str); 5] = [
    ("VGA", "std"),
    ("cirrus-vga", "cirrus"),
    ("vmware-svga", "vmware"),
    ("qxl-vga", "qxl"),
    ("virtio-vga", "virtio"),
];
/// Kinds of drives in whose presence QEMU makes none for CD-ROMs.
const DRIVES: [&str; 4] = ["ide-cd", "ide-hd", "scsi-cd", "scsi-hd"];
/// Where it puts its own, of the drives of a machine.
const OWN_INDEX: usize = 2;
const NETWORKS: [&str; 3] = ["netdev", "nic", "net"];

/// Adds to `now`, the form of the line `before` in which a guest goes on, what keeps the
/// devices that QEMU makes by itself as they are.
pub(super) fn keep_defaults(
    qmp: &mut Qmp,
    before: &[String],
    now: &mut Vec<String>,
) -> Result<(), QmpError> {
    let (before, after) = (Said::by(before), Said::by(now));
    let mut add = |words: &[&str]| now.extend(words.iter().map(|word| (*word).to_owned()));
    if after.of_display && !before.of_display {
        let kinds = unattached_kinds(qmp)?;
        let its = DISPLAYS.iter().find(|(kind, _)| kinds.iter().any(|it| it == kind));
        if let Some((_, name)) = its {
            add(&["-vga", name]);
        }
    }
    if after.of_drives && !before.of_drives && has_nameless_drive(qmp)? {
        // Without `if=`: on the kind of bus that this machine has for it.
        add(&["-drive", &format!("index={OWN_INDEX},media=cdrom")]);
    }
    if before.of_drives && !after.of_drives {
        // No option says "no CD-ROM drive"; any of such a kind does, this with its default.
        add(&["-global", "scsi-cd.write-cache=auto"]);
    }
    match (before.of_networks, after.of_networks) {
        (false, true) => add(&["-net", "nic", "-net", "user"]),
        (true, false) => add(&["-nic", "none"]),
        _ => {}
    }
    Ok(())
}

/// Whether QEMU has a drive for CD-ROMs without a name of the user's.
fn has_nameless_drive(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let blocks = qmp.execute("query-block", json!({}))?;
    Ok(blocks.as_array().into_iter().flatten().any(|block| {
        let name = block["device"].as_str().unwrap_or_default();
        block["removable"] == true && name.ends_with("-cd0")
    }))
}

/// What a command line says, so that QEMU makes it not by itself.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    of_display: bool,
    of_drives: bool,
    of_networks: bool,
}

impl Said {
    fn by(line: &[String]) -> Self {
        let mut said = Self::default();
        let mut first_drives = 0;
        for argument in arguments(line) {
            let value = argument.value.unwrap_or_default();
            let kind = match argument.name {
                "nodefaults" => {
                    return Self { of_display: true, of_drives: true, of_networks: true };
                }
                "vga" => {
                    said.of_display = true;
                    continue;
                }
                "device" => property(value, "driver"),
                "global" => global_kind(value),
                name => {
                    said.of_networks |= NETWORKS.contains(&name);
                    match place_of(name, value) {
                        Some(Place::First) => first_drives += 1,
                        Some(Place::MayBeOwn) => said.of_drives = true,
                        None => {}
                    }
                    continue;
                }
            };
            let kind = kind.unwrap_or_default();
            said.of_display |= DISPLAYS.iter().any(|(display, _)| *display == kind);
            said.of_drives |= DRIVES.contains(&kind.as_str());
        }
        // The next one is where QEMU would put its own.
        said.of_drives |= first_drives > OWN_INDEX;
        said
    }
}

/// The kind in `-global KIND.PROPERTY=VALUE`, or in the long form.
fn global_kind(value: &str) -> Option<String> {
    let short = value.split_once('.').filter(|(kind, _)| !kind.contains(['=', ',']));
    short.map_or_else(|| property(value, "driver"), |(kind, _)| Some(kind.to_owned()))
}

/// Where a drive of the machine is, of those that QEMU counts from zero.
enum Place {
    /// Before its own drive for CD-ROMs, or the next that is free.
    First,
    /// There, or it is not known where.
    MayBeOwn,
}

/// The place that an option gives a drive, where it makes one of the machine's own kind.
fn place_of(option: &str, value: &str) -> Option<Place> {
    let says = |key| property(value, key);
    match option {
        "" | "hda" | "hdb" => Some(Place::First),
        "hdc" | "cdrom" => Some(Place::MayBeOwn),
        "drive" if says("if").is_none_or(|kind| kind == "ide") => match says("index").as_deref() {
            None if says("bus").is_some() || says("unit").is_some() => Some(Place::MayBeOwn),
            None | Some("0" | "1") => Some(Place::First),
            Some("2") => Some(Place::MayBeOwn),
            Some(_) => None,
        },
        _ => None,
    }
}

/// What an option says of `key`; its first word may be `driver` without saying so.
fn property(value: &str, key: &str) -> Option<String> {
    Properties::parse(value).ok()?.get(key, "driver")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_line_tells_of() {
        let of = |words: &str| {
            let line: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
            let said = Said::by(&line);
            [said.of_display, said.of_drives, said.of_networks]
        };
        assert_eq!(of("-m 1G -device virtio-net-pci -nographic -mon x"), [false, false, false]);
        assert_eq!(of("-nodefaults -m 1G"), [true, true, true]);
        assert_eq!(of("-vga none"), [true, false, false]);
        assert_eq!(of("-global VGA.romsize=65536"), [true, false, false]);
        assert_eq!(of("-global driver=VGA,property=a,value=b.c"), [true, false, false]);
        assert_eq!(of("-device {\"driver\":\"scsi-hd\"}"), [false, true, false]);
        assert_eq!(of("-device scsi-hd,drive=d -cdrom x"), [false, true, false]);
        assert_eq!(of("-drive if=virtio,file=x -drive file=y,index=2"), [false, true, false]);
        assert_eq!(of("-drive file=x,if=virtio,index=2 -drive file=y"), [false, false, false]);
        assert_eq!(of("-drive file=x -drive file=y -drive file=z"), [false, true, false]);
        assert_eq!(of("-drive file=x,index=0 -drive file=y,index=3"), [false, false, false]);
        assert_eq!(of("-hda x -hdb y -drive file=z,media=cdrom"), [false, true, false]);
        assert_eq!(of("-nic none"), [false, false, true]);
    }
}
