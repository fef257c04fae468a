//! Disks that a process of ours serves to QEMU over NBD, and the monitor on which it hears of resets.

use super::options::{Properties, Unsupported, arguments};
use std::path::Path;

/// The monitor's socket, in a guest's folder.
pub const RESET_MONITOR_FILE: &str = "reset.sock";
const MONITOR: &str = "dewar-reset";
/// How long QEMU waits for a server that is gone, in seconds, before its guest sees an error. Who ends a server starts
/// another one; a person may have to.
const RECONNECTS_WITHIN: u32 = 7 * 24 * 3600;
/// Options by which a user says what is to happen at a reset or at a shutdown.
const OF_RESETS: [&str; 4] = ["no-reboot", "no-shutdown", "action", "watchdog-action"];

/// A disk that is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedNode {
    /// The node that a device names as its drive, and its name at the server.
    pub id: String,
    /// Its format: `raw` or `qcow2`.
    pub format: String,
    /// Whether the guest may not write it.
    pub is_read_only: bool,
}

/// The command line with such disks, on the server behind `socket`, and with a monitor behind `monitor`. A disk that no
/// device of the line names is one of virtio-blk.
///
/// # Errors
/// Where a device of the line cannot be understood.
pub fn with_served_disks(
    line: &[String],
    disks: &[ServedNode],
    socket: &Path,
    monitor: &Path,
) -> Result<Vec<String>, Unsupported> {
    // QEMU takes two commas for one.
    let path = |path: &Path| path.display().to_string().replace(',', ",,");
    let mut all = line.to_vec();
    for ServedNode { id, format, is_read_only } in disks {
        let access = if *is_read_only { "on" } else { "off" };
        all.extend([
            "-blockdev".to_owned(),
            format!(
                "driver=nbd,node-name={id}-server,server.type=unix,server.path={},export={id},\
                 reconnect-delay={RECONNECTS_WITHIN},read-only={access},discard=unmap",
                path(socket)
            ),
            "-blockdev".to_owned(),
            format!(
                "driver={format},node-name={id},file={id}-server,read-only={access},discard=unmap"
            ),
        ]);
        if !is_named(line, id)? {
            all.extend(["-device".to_owned(), format!("virtio-blk-pci,drive={id}")]);
        }
    }
    all.extend([
        "-chardev".to_owned(),
        format!("socket,id={MONITOR},path={},server=on,wait=off", path(monitor)),
        "-mon".to_owned(),
        format!("chardev={MONITOR},mode=control"),
    ]);
    Ok(all)
}

fn is_named(line: &[String], id: &str) -> Result<bool, Unsupported> {
    for argument in arguments(line).iter().filter(|it| it.name == "device") {
        let device = Properties::parse(argument.value.unwrap_or_default())?;
        if device.get("drive", "").as_deref() == Some(id) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The option by which a command line says itself what is to happen at a reset or a shutdown, if it does.
pub fn own_reset_option(line: &[String]) -> Option<String> {
    let all = arguments(line);
    all.iter().find(|it| OF_RESETS.contains(&it.name)).map(|it| format!("-{}", it.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_the_device_that_the_user_named_or_one_of_its_own() {
        let line: Vec<String> =
            ["-m", "1G", "-device", "scsi-hd,drive=root"].map(str::to_owned).to_vec();
        let disk = |id: &str| ServedNode {
            id: id.to_owned(),
            format: "raw".to_owned(),
            is_read_only: false,
        };
        let with = |id: &str| {
            let all = with_served_disks(&line, &[disk(id)], Path::new("/a,b"), Path::new("/c"));
            all.expect("a line").join(" ")
        };
        assert!(!with("root").contains("virtio-blk-pci"));
        assert!(with("data").contains("-device virtio-blk-pci,drive=data"));
        assert!(with("data").contains("server.path=/a,,b,export=data"));
        assert_eq!(own_reset_option(&line), None);
        let own: Vec<String> = ["-m", "1G", "-no-reboot"].map(str::to_owned).to_vec();
        assert_eq!(own_reset_option(&own).as_deref(), Some("-no-reboot"));
    }
}
