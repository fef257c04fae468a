//! What QEMU makes by itself.
//!
//! Unless it is told otherwise QEMU gives a machine a display adapter, a CD-ROM drive and a
//! network card (`default_list` and `default_net` in system/vl.c). It takes for being told
//! not only options for these, but any `-device` and any `-global` that names a kind that
//! would do instead. Words that are put on a command line, or taken from it, must not
//! change which of them there are: a state of other devices cannot be loaded. So what
//! they would take away is asked for by name, and what they would let come is kept away.

use super::roms::unattached_kinds;
use crate::cmdline::{Properties, arguments};
use crate::qmp::{Qmp, QmpError};
use serde_json::json;

/// Kinds of display adapters, and how `-vga` calls those that QEMU makes by itself.
const DISPLAYS: [(&str, &str); 10] = [
    ("VGA", "std"),
    ("cirrus-vga", "cirrus"),
    ("vmware-svga", "vmware"),
    ("qxl-vga", "qxl"),
    ("virtio-vga", "virtio"),
    ("isa-vga", ""),
    ("isa-cirrus-vga", ""),
    ("ati-vga", ""),
    ("vhost-user-vga", ""),
    ("virtio-vga-gl", ""),
];
/// Kinds of drives in whose presence QEMU makes none for CD-ROMs.
const DRIVES: [&str; 4] = ["ide-cd", "ide-hd", "scsi-cd", "scsi-hd"];
/// Where it puts its own.
const OWN_INDEX: &str = "2";
const NETWORKS: [&str; 3] = ["netdev", "nic", "net"];

/// Adds to `now`, the form of the line `before` in which a guest goes on, what keeps the
/// devices that QEMU makes by itself as they are.
pub(super) fn keep_defaults(
    qmp: &mut Qmp,
    before: &[String],
    now: &mut Vec<String>,
) -> Result<(), QmpError> {
    let (before, after) = (Told::by(before), Told::by(now));
    let mut add = |words: &[&str]| now.extend(words.iter().map(|word| (*word).to_owned()));
    if after.of_display && !before.of_display {
        let kinds = unattached_kinds(qmp)?;
        let its = DISPLAYS.iter().find(|(kind, _)| kinds.iter().any(|it| it == kind));
        if let Some((_, name)) = its.filter(|(_, name)| !name.is_empty()) {
            add(&["-vga", name]);
        }
    }
    if after.of_drives && !before.of_drives && has_empty_drive(qmp)? {
        // On whatever the machine has.
        add(&["-drive", &format!("index={OWN_INDEX},media=cdrom")]);
    }
    if before.of_drives && !after.of_drives {
        add(&["-global", "scsi-cd.write-cache=auto"]);
    }
    match (before.of_networks, after.of_networks) {
        (false, true) => add(&["-net", "nic", "-net", "user"]),
        (true, false) => add(&["-nic", "none"]),
        _ => {}
    }
    Ok(())
}

/// Whether QEMU has a drive for CD-ROMs that no word of a command line can have made.
fn has_empty_drive(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let blocks = qmp.execute("query-block", json!({}))?;
    Ok(blocks.as_array().into_iter().flatten().any(|block| {
        let name = block["device"].as_str().unwrap_or_default();
        block["removable"] == true && name.ends_with("-cd0")
    }))
}

/// What a command line tells of, so that QEMU makes it not by itself.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    of_display: bool,
    of_drives: bool,
    of_networks: bool,
}

impl Told {
    fn by(line: &[String]) -> Self {
        let mut told = Self::default();
        for argument in arguments(line) {
            let value = argument.value.unwrap_or_default();
            let kind = match argument.name {
                "nodefaults" => {
                    return Self { of_display: true, of_drives: true, of_networks: true };
                }
                "vga" => {
                    told.of_display = true;
                    continue;
                }
                "device" => property(value, "driver"),
                "global" => global_kind(value),
                name => {
                    told.of_networks |= NETWORKS.contains(&name);
                    // It is where QEMU would put its own.
                    told.of_drives |= name == "cdrom" || name == "hdc";
                    told.of_drives |=
                        name == "drive" && property(value, "index").as_deref() == Some(OWN_INDEX);
                    continue;
                }
            };
            let kind = kind.unwrap_or_default();
            told.of_display |= DISPLAYS.iter().any(|(display, _)| *display == kind);
            told.of_drives |= DRIVES.contains(&kind.as_str());
        }
        told
    }
}

/// The kind in `-global KIND.PROPERTY=VALUE`, or in the long form.
fn global_kind(value: &str) -> Option<String> {
    let short = value.split_once('.').filter(|(kind, _)| !kind.contains(['=', ',']));
    short.map_or_else(|| property(value, "driver"), |(kind, _)| Some(kind.to_owned()))
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
            let told = Told::by(&line);
            [told.of_display, told.of_drives, told.of_networks]
        };
        assert_eq!(of("-m 1G -device virtio-net-pci -nographic -mon x"), [false, false, false]);
        assert_eq!(of("-nodefaults -m 1G"), [true, true, true]);
        assert_eq!(of("-vga none"), [true, false, false]);
        assert_eq!(of("-global VGA.romsize=65536"), [true, false, false]);
        assert_eq!(of("-global driver=VGA,property=a,value=b.c"), [true, false, false]);
        assert_eq!(of("-device {\"driver\":\"scsi-hd\"}"), [false, true, false]);
        assert_eq!(of("-device scsi-hd,drive=d -cdrom x"), [false, true, false]);
        assert_eq!(of("-drive if=virtio,file=x -drive file=y,index=2"), [false, true, false]);
        assert_eq!(of("-nic none"), [false, false, true]);
    }
}
