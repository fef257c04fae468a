//! That a QEMU started with a guest's command line would open the disks that the
//! guest has now.

use crate::cmdline::{
    BOOTED, Properties, arguments, disk_places, file_of, nested_filename, replace_disk,
};
use crate::qmp::{Qmp, QmpError};
use dewar_registry::GuestRecord;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The first disk whose file is another than the command line says: by a snapshot or a
/// commit, a changed medium, a hot-plugged disk.
pub(crate) fn stale_disk(
    qmp: &mut Qmp,
    record: &GuestRecord,
    line: &[String],
) -> Result<Option<String>, QmpError> {
    let blocks = drives_now(qmp)?;
    Ok(other_file(&blocks, record, line).or_else(|| moved_node(&blocks, record, line)))
}

/// A command line whose disks are the ones that the guest writes now, where its user put a
/// snapshot on top of one: the new file is in the old one's place, and names it as what it
/// stands on.
pub(super) fn on_its_snapshots(
    qmp: &mut Qmp,
    folder: &Path,
    mut line: Vec<String>,
) -> Result<Vec<String>, QmpError> {
    let real = |file: &str| fs::canonicalize(folder.join(file)).ok();
    let named = |name: &Value| name.as_str().and_then(file_of).and_then(|file| real(&file));
    for block in drives_now(qmp)? {
        let inserted = &block["inserted"];
        let (Some(now), Some("qcow2")) = (named(&inserted["file"]), inserted["drv"].as_str())
        else {
            continue;
        };
        let places = disk_places(&line).unwrap_or_default();
        let is_at = |path: &PathBuf| {
            let of =
                |it: &crate::cmdline::DiskPlace| file_of(&it.path).and_then(|file| real(&file));
            places.iter().find(|it| of(it).as_ref() == Some(path))
        };
        if is_at(&now).is_some() {
            continue;
        }
        let mut below = &inserted["image"]["backing-image"];
        while !below.is_null() {
            if let Some(place) = named(&below["filename"]).as_ref().and_then(is_at) {
                // What cannot be read there is refused where the line is planned.
                let _ = replace_disk(&mut line, place, &now.display().to_string());
                break;
            }
            below = &below["backing-image"];
        }
    }
    Ok(line)
}

/// What of a guest's disks a checkpoint could not bring back by this command line.
pub(crate) fn unrestorable_disk(
    qmp: &mut Qmp,
    record: &GuestRecord,
    line: &[String],
) -> Result<Option<String>, QmpError> {
    let blocks = drives_now(qmp)?;
    let moved = moved_node(&blocks, record, line).or_else(|| encrypted(&blocks));
    Ok(moved.or_else(|| other_medium(&blocks, record, line)))
}

/// The first disk whose copy would not be as secret as it is.
fn encrypted(blocks: &[Value]) -> Option<String> {
    let is_secret =
        |it: &&Value| it["inserted"]["encrypted"] == true && it["inserted"]["ro"] == false;
    let block = blocks.iter().find(is_secret)?;
    Some(format!("disk '{}' is encrypted, and its copy would not be", name_of(block)))
}

/// The first block node of the line's own that another took the place of, with another file.
fn moved_node(blocks: &[Value], record: &GuestRecord, line: &[String]) -> Option<String> {
    let real = |file: &str| fs::canonicalize(record.folder.join(file)).ok();
    let now: Vec<PathBuf> =
        blocks.iter().filter_map(|it| real(&file_of(it["inserted"]["file"].as_str()?)?)).collect();
    let nodes = options_of(line, "blockdev");
    let in_use = |node: &String| blocks.iter().any(|it| it["inserted"]["node-name"] == **node);
    // With the same file it is that disk under another name: a snapshot of its user's.
    let is_there = |node: &String| {
        file_of_node(&nodes, node).and_then(|file| real(&file)).is_some_and(|it| now.contains(&it))
    };
    let of_devices = options_of(line, "device");
    let mut of_devices = of_devices.iter().filter_map(|it| it.get("drive", ""));
    let is_named =
        |node: &String| nodes.iter().any(|it| it.get("node-name", "").as_ref() == Some(node));
    let moved = of_devices.find(|node| is_named(node) && !in_use(node) && !is_there(node))?;
    Some(format!("block node '{moved}' is no longer that of its device"))
}

/// The file at the bottom of a block node of the line's.
fn file_of_node(nodes: &[Properties], name: &str) -> Option<String> {
    let node = nodes.iter().find(|it| it.get("node-name", "").as_deref() == Some(name))?;
    node.get("filename", "").or_else(|| nested_filename(node)).or_else(|| {
        // Another node, which is not above this one.
        let below = node.get("file", "").filter(|below| below != name)?;
        let others: Vec<Properties> = nodes
            .iter()
            .filter(|it| it.get("node-name", "").as_deref() != Some(name))
            .cloned()
            .collect();
        file_of_node(&others, &below)
    })
}

/// How QEMU calls a drive.
fn name_of(block: &Value) -> &str {
    let device = block["device"].as_str().filter(|name| !name.is_empty());
    device.or(block["qdev"].as_str()).unwrap_or("?")
}

/// The first read-only medium in a drive that is another than the command line says.
pub(crate) fn changed_medium(
    qmp: &mut Qmp,
    record: &GuestRecord,
    line: &[String],
) -> Result<Option<String>, QmpError> {
    Ok(other_medium(&drives_now(qmp)?, record, line))
}

/// The same; where a file of options tells of media it is not known.
fn other_medium(blocks: &[Value], record: &GuestRecord, line: &[String]) -> Option<String> {
    if arguments(line).iter().any(|argument| argument.name == "readconfig") {
        return None;
    }
    let is_medium = |it: &&Value| it["removable"] == true && it["inserted"]["ro"] == true;
    let media: Vec<Value> = blocks.iter().filter(is_medium).cloned().collect();
    other_file(&media, record, line)
}

/// QEMU's drives, and what is in them.
fn drives_now(qmp: &mut Qmp) -> Result<Vec<Value>, QmpError> {
    match qmp.execute("query-block", json!({}))? {
        Value::Array(blocks) => Ok(blocks),
        _ => Ok(Vec::new()),
    }
}

/// The first drive whose file is another than the command line says, or than QEMU has open.
fn other_file(blocks: &[Value], record: &GuestRecord, line: &[String]) -> Option<String> {
    let real = |file: &str| -> PathBuf {
        let path = record.folder.join(file);
        fs::canonicalize(&path).unwrap_or(path)
    };
    let places = disk_places(line).unwrap_or_default();
    let paths = places.iter().filter_map(|place| file_of(&place.path));
    let named: Vec<PathBuf> = paths.map(|path| real(&path)).collect();
    let drives = drives(line);
    let mut seen = Vec::new();
    for block in blocks {
        // What is no file is opened by the same words again.
        let Some(file) = block["inserted"]["file"].as_str().and_then(file_of) else { continue };
        let device = block["device"].as_str().filter(|name| !name.is_empty());
        let own = device.and_then(|name| drives.get(name)).map(|path| real(path));
        let count = |all: &[PathBuf]| all.iter().filter(|it| **it == real(&file)).count();
        seen.push(real(&file));
        // Two drives with one file, of which the line gives it to one.
        let is_named = count(&seen) <= count(&named);
        if !is_named || own.is_some_and(|own| own != real(&file)) {
            return Some(format!(
                "disk '{}' is {file} now, not what QEMU began with",
                name_of(block)
            ));
        }
        if !is_open(record.process.pid, &real(&file)) {
            return Some(format!(
                "disk '{}': {file} is not the file any more that QEMU has open",
                name_of(block)
            ));
        }
    }
    None
}

/// Whether a process has this very file open: by its name there may be another one now. Where
/// that cannot be told it is taken to be so.
fn is_open(process: i32, path: &Path) -> bool {
    let Ok(files) = fs::read_dir(format!("/proc/{process}/fd")) else { return true };
    let place = |data: fs::Metadata| (data.dev(), data.ino());
    let wanted = fs::metadata(path).map(place);
    wanted.is_ok_and(|wanted| {
        files
            .flatten()
            .any(|file| fs::metadata(file.path()).map(place).is_ok_and(|it| it == wanted))
    })
}

/// What `-kernel` and its like name and is not there any more.
pub(crate) fn missing_file(record: &GuestRecord, line: &[String]) -> Option<String> {
    let all = arguments(line);
    let mut files = all.iter().filter(|it| BOOTED.contains(&it.name)).filter_map(|it| it.value);
    let missing = files.find(|file| !record.folder.join(file).exists());
    missing.map(|file| format!("{file}, which QEMU would need to start again, is gone"))
}

/// The files of the drives that have names.
fn drives(line: &[String]) -> HashMap<String, String> {
    let drive = |it: &Properties| Some((it.get("id", "")?, file_of(&it.get("file", "")?)?));
    options_of(line, "drive").iter().filter_map(drive).collect()
}

/// What is said with all options of a name.
fn options_of(line: &[String], name: &str) -> Vec<Properties> {
    let all = arguments(line);
    let all = all.iter().filter(|it| it.name == name);
    all.filter_map(|it| Properties::parse(it.value?).ok()).collect()
}
