//! That a QEMU started with a guest's command line would open the disks that the
//! guest has now.

use crate::cmdline::{BOOTED, Properties, arguments, disk_places};
use crate::qmp::{Qmp, QmpError};
use crate::registry::GuestRecord;
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
    Ok(other_file(&blocks, record, line).or_else(|| moved_node(&blocks, line)))
}

/// What of a guest's disks a checkpoint could not bring back by this command line.
pub(crate) fn unrestorable_disk(
    qmp: &mut Qmp,
    record: &GuestRecord,
    line: &[String],
) -> Result<Option<String>, QmpError> {
    let blocks = drives_now(qmp)?;
    let moved = moved_node(&blocks, line).or_else(|| encrypted(&blocks));
    Ok(moved.or_else(|| other_medium(&blocks, record, line)))
}

/// The first disk whose copy would not be as secret as it is.
fn encrypted(blocks: &[Value]) -> Option<String> {
    let is_secret =
        |it: &&Value| it["inserted"]["encrypted"] == true && it["inserted"]["ro"] == false;
    let block = blocks.iter().find(is_secret)?;
    Some(format!("disk '{}' is encrypted, and its copy would not be", name_of(block)))
}

/// The first block node of the line's own that another took the place of.
fn moved_node(blocks: &[Value], line: &[String]) -> Option<String> {
    let in_use = |node: &String| blocks.iter().any(|it| it["inserted"]["node-name"] == **node);
    let moved = nodes_of_devices(line).into_iter().find(|node| !in_use(node));
    moved.map(|node| format!("block node '{node}' is no longer that of its device"))
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
    let real_of = |path: &str| real(path.strip_prefix("file:").unwrap_or(path));
    let places = disk_places(line).unwrap_or_default();
    let paths = places.iter().filter_map(|place| file_of(&place.path)).chain(nested_files(line));
    let named: Vec<PathBuf> = paths.map(|path| real_of(&path)).collect();
    let drives = drives(line);
    let mut seen = Vec::new();
    for block in blocks {
        // What is no file is opened by the same words again.
        let Some(file) = block["inserted"]["file"].as_str().and_then(file_of) else { continue };
        let device = block["device"].as_str().filter(|name| !name.is_empty());
        let own = device.and_then(|name| drives.get(name)).map(|path| real_of(path));
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

/// The file at the bottom of what QEMU calls a disk, if it is one. Where a name does not
/// say all, QEMU writes it as JSON: of a disk whose backing file was given to it, say.
fn file_of(name: &str) -> Option<String> {
    let Some(options) = name.strip_prefix("json:") else {
        return (!name.contains("://")).then(|| name.to_owned());
    };
    bottom_of(&serde_json::from_str(options).ok()?)
}

fn bottom_of(node: &Value) -> Option<String> {
    match &node["file"] {
        below @ Value::Object(_) => bottom_of(below),
        _ => Some(node["filename"].as_str()?.to_owned()),
    }
}

/// Files that are named below the second level: behind a filter, say.
fn nested_files(line: &[String]) -> Vec<String> {
    let of = |it: Properties| match it {
        Properties::Json(map) => bottom_of(&Value::Object(map)),
        pairs => pairs.get("file.file.filename", "").or(pairs.get("file.filename", "")),
    };
    let all = ["drive", "blockdev"].into_iter().flat_map(|name| options_of(line, name));
    all.filter_map(of).collect()
}

/// The files of the drives that have names.
fn drives(line: &[String]) -> HashMap<String, String> {
    let drive = |it: &Properties| Some((it.get("id", "")?, file_of(&it.get("file", "")?)?));
    options_of(line, "drive").iter().filter_map(drive).collect()
}

/// The block nodes that devices of the line stand on, by its own words.
fn nodes_of_devices(line: &[String]) -> Vec<String> {
    let of = |name: &str, key: &str| -> Vec<String> {
        options_of(line, name).iter().filter_map(|it| it.get(key, "")).collect()
    };
    let nodes = of("blockdev", "node-name");
    of("device", "drive").into_iter().filter(|drive| nodes.contains(drive)).collect()
}

/// What is said with all options of a name.
fn options_of(line: &[String], name: &str) -> Vec<Properties> {
    let all = arguments(line);
    let all = all.iter().filter(|it| it.name == name);
    all.filter_map(|it| Properties::parse(it.value?).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::file_of;

    #[test]
    fn names_of_disks_lead_to_their_files() {
        for (name, file) in [
            ("/a/b.qcow2", Some("/a/b.qcow2")),
            ("nbd://host/export", None),
            (
                r#"json:{"driver":"qcow2","backing":{"driver":"raw","file":{"filename":"/base"}},
                   "file":{"driver":"file","filename":"/var/tmp/vl.x"}}"#,
                Some("/var/tmp/vl.x"),
            ),
            (r#"json:{"driver":"raw","file":{"driver":"nbd","server":{"host":"h"}}}"#, None),
        ] {
            assert_eq!(file_of(name).as_deref(), file, "{name}");
        }
    }
}
