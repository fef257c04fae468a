//! Disks that a process of ours serves to QEMU over NBD, and the monitor on which it hears of resets.
//!
//! A guest's command line names the files of such disks as any other line does, below a node whose name says that they
//! are served. So what looks for a guest's disks finds them, and what gives it others (a restore) changes them. Where a
//! QEMU is started with the line, that node is one of NBD ([`over_nbd`]).

use super::options::{Argument, Properties, Unsupported, arguments, change_option};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The monitor's socket, in a guest's folder.
pub const RESET_MONITOR_FILE: &str = "reset.sock";
/// The server's socket, in a guest's folder.
pub const DISKS_SOCKET_FILE: &str = "disks.sock";
/// How much of a disk's id there is room for in the names of its block nodes.
pub const LONGEST_DISK_ID: usize = 31 - SERVED.len();
/// The end of the name of a node that is served; before it stands the name of the node above.
const SERVED: &str = ".dewar-served";
/// The same of a node that QEMU has to itself where it was served before.
const OWN: &str = ".dewar-own";
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
    /// Its file, or block device.
    pub path: PathBuf,
    /// Its format: `raw` or `qcow2`.
    pub format: String,
    /// Whether the guest may not write it.
    pub is_read_only: bool,
}

/// The command line with such disks, and with a monitor behind `monitor`. A disk that no device of the line names is one
/// of virtio-blk.
///
/// # Errors
/// Where a device of the line cannot be understood, or a node has a name as those that are served.
pub fn with_served_disks(
    line: &[String],
    disks: &[ServedNode],
    monitor: &Path,
) -> Result<Vec<String>, Unsupported> {
    if let Some(node) = served_nodes(line).first() {
        return Err(Unsupported(format!("block node {}{SERVED}: that name is Dewar's", node.id)));
    }
    let mut all = line.to_vec();
    for ServedNode { id, path, format, is_read_only } in disks {
        let access = if *is_read_only { "on" } else { "off" };
        let is_device = fs::metadata(path).is_ok_and(|it| it.file_type().is_block_device());
        let driver = if is_device { "host_device" } else { "file" };
        let path = doubled(path);
        all.extend([
            "-blockdev".to_owned(),
            format!(
                "driver={driver},node-name={id}{SERVED},filename={path},read-only={access},discard=unmap"
            ),
            "-blockdev".to_owned(),
            format!(
                "driver={format},node-name={id},file={id}{SERVED},read-only={access},discard=unmap"
            ),
        ]);
        if !is_named(line, id)? {
            all.extend(["-device".to_owned(), format!("virtio-blk-pci,drive={id}")]);
        }
    }
    all.extend([
        "-chardev".to_owned(),
        format!("socket,id={MONITOR},path={},server=on,wait=off", doubled(monitor)),
        "-mon".to_owned(),
        format!("chardev={MONITOR},mode=control"),
    ]);
    Ok(all)
}

/// The served disks of a command line.
pub fn served_nodes(line: &[String]) -> Vec<ServedNode> {
    let all = arguments(line);
    let nodes = all.iter().filter(|it| it.name == "blockdev");
    let nodes: Vec<Properties> =
        nodes.filter_map(|node| Properties::parse(node.value?).ok()).collect();
    let served = nodes.iter().filter_map(|node| {
        let name = node.get("node-name", "")?;
        let id = name.strip_suffix(SERVED)?;
        let above = nodes.iter().find(|it| it.get("node-name", "").as_deref() == Some(id))?;
        Some(ServedNode {
            id: id.to_owned(),
            path: PathBuf::from(node.get("filename", "")?),
            format: above.get("driver", "driver")?,
            is_read_only: node.switch("read-only") == Some(true),
        })
    });
    served.collect()
}

/// The command line as QEMU gets it: what is served is so by the process behind `socket`.
pub(super) fn over_nbd(line: &mut [String], socket: &Path) {
    for ServedNode { id, is_read_only, .. } in served_nodes(line) {
        let access = if is_read_only { "on" } else { "off" };
        let node = format!(
            "driver=nbd,node-name={id}{SERVED},server.type=unix,server.path={},export={id},\
             reconnect-delay={RECONNECTS_WITHIN},read-only={access},discard=unmap",
            doubled(socket)
        );
        let its = ("node-name", format!("{id}{SERVED}"));
        change_option(line, "blockdev", (its.0, &its.1), |_| node.clone());
    }
}

/// The command line of a QEMU that has the served disks to itself, and does resets itself.
pub fn without_server(line: &[String]) -> Vec<String> {
    let mut line = line.to_vec();
    for ServedNode { id, .. } in served_nodes(&line) {
        let (served, own) = (format!("{id}{SERVED}"), format!("{id}{OWN}"));
        for key in ["node-name", "file"] {
            change_option(&mut line, "blockdev", (key, &served), |node| {
                node.set(key, &own, Value::from(own.as_str()));
                node.to_string()
            });
        }
    }
    let all = arguments(&line);
    let is_monitor = |it: &&Argument<'_>| {
        let options = it.value.and_then(|value| Properties::parse(value).ok());
        let named = |key: &str| options.as_ref()?.get(key, "");
        match it.name {
            "chardev" => named("id").as_deref() == Some(MONITOR),
            "mon" => named("chardev").as_deref() == Some(MONITOR),
            _ => false,
        }
    };
    let removed: Vec<usize> = all.iter().filter(is_monitor).map(|it| it.at).collect();
    let words = line.iter().enumerate();
    let kept = words.filter(|(at, _)| !removed.iter().any(|from| (*from..*from + 2).contains(at)));
    kept.map(|(_, word)| word.clone()).collect()
}

/// Moves the monitor of a command line that has one to another socket: the guest may come back by another name.
pub(super) fn move_reset_monitor(line: &mut [String], socket: &Path) {
    let path = socket.display().to_string();
    change_option(line, "chardev", ("id", MONITOR), |chardev| {
        chardev.set("path", &path, Value::from(path.as_str()));
        chardev.to_string()
    });
}

/// QEMU takes two commas for one.
fn doubled(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
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

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn disk(id: &str) -> ServedNode {
        ServedNode {
            id: id.to_owned(),
            path: PathBuf::from("/d,1.raw"),
            format: "raw".to_owned(),
            is_read_only: false,
        }
    }

    #[test]
    fn a_disk_has_the_device_that_the_user_named_or_one_of_its_own() {
        let line = words("-m 1G -device scsi-hd,drive=root");
        let with = |id: &str| {
            with_served_disks(&line, &[disk(id)], Path::new("/c")).expect("a line").join(" ")
        };
        assert!(!with("root").contains("virtio-blk-pci"));
        assert!(with("data").contains("-device virtio-blk-pci,drive=data"));
        assert_eq!(own_reset_option(&line), None);
        assert_eq!(own_reset_option(&words("-m 1G -no-reboot")).as_deref(), Some("-no-reboot"));
    }

    #[test]
    fn a_line_names_the_files_and_qemu_gets_the_server() {
        let mut line =
            with_served_disks(&words("-m 1G"), &[disk("data")], Path::new("/c")).expect("a line");
        assert_eq!(served_nodes(&line), [disk("data")]);
        let twice = with_served_disks(&line, &[disk("data")], Path::new("/c"));
        assert!(twice.is_err(), "{twice:?}");
        let own = without_server(&line).join(" ");
        let (file, above) = ("driver=file,node-name=data.dewar-own", "file=data.dewar-own");
        assert!(own.contains(file) && own.contains(above) && own.contains("drive=data"), "{own}");
        assert!(!own.contains("dewar-served") && !own.contains("dewar-reset"), "{own}");
        move_reset_monitor(&mut line, Path::new("/g,1/reset.sock"));
        over_nbd(&mut line, Path::new("/g,1/disks.sock"));
        let line = line.join(" ");
        assert!(line.contains("server.path=/g,,1/disks.sock,export=data,"), "{line}");
        assert!(line.contains("path=/g,,1/reset.sock,server=on"), "{line}");
        assert!(line.contains("driver=raw,node-name=data,file=data.dewar-served"), "{line}");
        assert!(!line.contains("d,,1.raw"), "{line}");
    }
}
