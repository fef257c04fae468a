//! The command line of a restored guest: the user's own, with other RAM files
//! and other disk files.

use super::exclusive_resources::take_over;
use super::heartbeats::{PORT_FILE, move_heartbeats};
use super::memory::{RunPlan, plan_run};
use super::options::{Argument, Properties, Unsupported, arguments};
use super::served_disks::{RESET_MONITOR_FILE, move_reset_monitor};
use dewar_registry::Descriptors;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A disk file on a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskPlace {
    /// Where its option stands.
    pub at: usize,
    /// The file, as written.
    pub path: String,
    form: DiskForm,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum DiskForm {
    /// `-hda FILE`, or the file alone.
    Plain,
    /// `-drive file=FILE,…`
    Drive,
    /// `-blockdev driver=file,filename=FILE,node-name=…`, a protocol node.
    Protocol { node: String },
    /// `-blockdev driver=qcow2,file.filename=FILE,…`, format and protocol, with filters above
    /// them perhaps.
    Format,
}

/// The file at the bottom of what QEMU calls a disk, or of what an option says of one; nothing
/// where it is no file. Where a name does not say all, QEMU writes it as JSON: of a disk whose
/// backing file was given to it, say.
pub(crate) fn file_of(name: &str) -> Option<String> {
    if let Some(options) = name.strip_prefix("json:") {
        return bottom_of(&serde_json::from_str(options).ok()?);
    }
    // A name with a colon is a path where it says so.
    let path = name.strip_prefix("file:").unwrap_or(name);
    (!name.contains("://")).then(|| path.to_owned())
}

/// The file at the bottom of a block node.
fn bottom_of(node: &Value) -> Option<String> {
    match &node["file"] {
        below @ Value::Object(_) => bottom_of(below),
        _ => Some(node["filename"].as_str()?.to_owned()),
    }
}

/// The disk files of a command line. Checkpoints name disks by their numbers here, so
/// that what a later version came to know of (media that can be taken out) comes last.
///
/// # Errors
/// Where an option cannot be read.
pub fn disk_places(line: &[String]) -> Result<Vec<DiskPlace>, Unsupported> {
    let (mut places, mut media, mut nested) = (Vec::new(), Vec::new(), Vec::new());
    for argument in arguments(line) {
        let value = argument.value.unwrap_or_default();
        let (path, form) = match argument.name {
            "" | "hda" | "hdb" | "hdc" | "hdd" | "cdrom" | "fda" | "fdb" | "sd" | "mtdblock"
            | "pflash" => (Some(value.to_owned()), DiskForm::Plain),
            "drive" => {
                let drive = Properties::parse(value)?;
                let Some(file) = drive.get("file", "") else {
                    let (path, form) = (nested_filename(&drive), DiskForm::Drive);
                    nested.extend(path.map(|path| DiskPlace { at: argument.at, path, form }));
                    continue;
                };
                // As JSON it had its number before it was known what is in it.
                let file = file_of(&file).filter(|_| file.starts_with("json:")).unwrap_or(file);
                (Some(file), DiskForm::Drive)
            }
            "blockdev" => {
                let node = Properties::parse(value)?;
                let name = node.get("node-name", "").unwrap_or_default();
                match node.get("filename", "") {
                    Some(path) => (Some(path), DiskForm::Protocol { node: name }),
                    None if is_below_filter(&node) => {
                        let (path, form) = (nested_filename(&node), DiskForm::Format);
                        nested.extend(path.map(|path| DiskPlace { at: argument.at, path, form }));
                        continue;
                    }
                    None => (nested_filename(&node), DiskForm::Format),
                }
            }
            _ => continue,
        };
        let place = path.map(|path| DiskPlace { at: argument.at, path, form });
        match argument.name {
            "cdrom" | "fda" | "fdb" => media.extend(place),
            _ => places.extend(place),
        }
    }
    places.extend(media);
    places.extend(nested);
    Ok(places)
}

/// Whether a file is named below the second level: of a format that is behind a filter.
fn is_below_filter(node: &Properties) -> bool {
    match node {
        Properties::Json(map) => map.get("file").is_some_and(|below| below["file"].is_object()),
        pairs => pairs.get("file.filename", "").is_none(),
    }
}

/// The file at the bottom of what an option says, where that is below its first level.
pub(crate) fn nested_filename(node: &Properties) -> Option<String> {
    match node {
        Properties::Json(map) => bottom_of(map.get("file")?),
        pairs => {
            // The innermost is the longest.
            let keys = ["file.file.file.filename", "file.file.filename", "file.filename"];
            keys.iter().find_map(|key| pairs.get(key, ""))
        }
    }
}

/// What a restored guest needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestorePlan {
    /// The user's command line with the new disk files.
    pub line: Vec<String>,
    /// What is run, waiting for its state (`-incoming defer`).
    pub run: RunPlan,
}

/// Plans the command line of a restored guest: `line` as it was saved, to be started in
/// `folder`, RAM in files that `ram_path` names, each disk of `overlays` (by its place's
/// index in [`disk_places`]) replaced by a qcow2 file. The machine type is pinned to
/// `machine`, the versioned name that it had: a newer QEMU's `q35` is another
/// machine, and would not take the saved state. Logs are appended to, as in any other
/// QEMU that goes on with a guest ([`take_over`]).
///
/// # Errors
/// As [`plan_run`], and where it needs what only the QEMU before had.
pub fn plan_restore(
    line: &[String],
    qmp: &Path,
    ram_path: impl Fn(&str) -> PathBuf,
    overlays: &HashMap<usize, PathBuf>,
    machine: &str,
    folder: &Path,
) -> Result<RestorePlan, Unsupported> {
    let mut line = line.to_vec();
    refuse_another_root(&line)?;
    let places = disk_places(&line)?;
    for (index, overlay) in overlays {
        if let Some(place) = places.get(*index) {
            replace_disk(&mut line, place, &overlay.display().to_string())?;
        }
    }
    move_heartbeats(&mut line, &qmp.with_file_name(PORT_FILE));
    move_reset_monitor(&mut line, &qmp.with_file_name(RESET_MONITOR_FILE));
    let own_line = line.clone();
    let scratch = qmp.parent().unwrap_or(Path::new("/"));
    line = take_over(&line, folder, scratch, None, &Descriptors::new())?.line;
    // The saved command line may name files of RAM that belong to another
    // guest, or to nobody: every backend gets a file of its own.
    line = change_backends(&line, |object| object.remove("mem-path"))?;
    line.extend(["-machine".to_owned(), format!("type={machine}")]);
    let mut run = plan_run(&line, qmp, ram_path)?;
    run.arguments.extend(["-incoming".to_owned(), "defer".to_owned()]);
    Ok(RestorePlan { line: own_line, run })
}

/// That QEMU finds its files under the names that Dewar has for them, also when the guest is
/// to be let run: it opens its disks again then.
fn refuse_another_root(line: &[String]) -> Result<(), Unsupported> {
    let changes = |argument: &Argument<'_>| match argument.name {
        "chroot" => true,
        "run-with" => argument
            .value
            .and_then(|value| Properties::parse(value).ok())
            .is_some_and(|options| options.get("chroot", "").is_some()),
        _ => false,
    };
    match arguments(line).iter().find(|argument| changes(argument)) {
        None => Ok(()),
        Some(argument) => Err(Unsupported(format!(
            "-{}: after its start QEMU sees other files under its disks' names",
            argument.name
        ))),
    }
}

/// Changes the memory backends of a command line.
fn change_backends(
    line: &[String],
    mut change: impl FnMut(&mut Properties),
) -> Result<Vec<String>, Unsupported> {
    let mut changed = line.to_vec();
    for argument in arguments(line).iter().filter(|argument| argument.name == "object") {
        let mut object = Properties::parse(argument.value.unwrap_or_default())?;
        let kind = object.get("qom-type", "qom-type").unwrap_or_default();
        if kind.starts_with("memory-backend-") {
            change(&mut object);
            changed[argument.at + 1] = object.to_string();
        }
    }
    Ok(changed)
}

/// A command line that names no files for the memory backends of which `owned`
/// holds.
///
/// # Errors
/// Where an option cannot be read.
pub fn without_ram_paths(
    line: &[String],
    owned: &dyn Fn(&str) -> bool,
) -> Result<Vec<String>, Unsupported> {
    change_backends(line, |object| {
        if object.get("id", "").is_some_and(|id| owned(&id)) {
            object.remove("mem-path");
        }
    })
}

/// Puts another file, a qcow2 one, in the place of a disk's.
pub(crate) fn replace_disk(
    line: &mut [String],
    place: &DiskPlace,
    file: &str,
) -> Result<(), Unsupported> {
    match &place.form {
        DiskForm::Plain if line[place.at].starts_with('-') => line[place.at + 1] = file.to_owned(),
        DiskForm::Plain => line[place.at] = file.to_owned(),
        DiskForm::Drive => {
            let mut drive = Properties::parse(&line[place.at + 1])?;
            if let Properties::Pairs(pairs) = &mut drive {
                pairs.retain(|(key, _)| !key.starts_with("file."));
            }
            drive.set("file", file, Value::from(file));
            drive.remove("driver");
            drive.set("format", "qcow2", Value::from("qcow2"));
            forget_content(&mut drive);
            line[place.at + 1] = drive.to_string();
        }
        DiskForm::Protocol { node } => {
            let mut protocol = Properties::parse(&line[place.at + 1])?;
            protocol.set("filename", file, Value::from(file));
            // It may have been a block device.
            protocol.set_implied("driver", "file");
            line[place.at + 1] = protocol.to_string();
            set_format(line, node)?;
        }
        DiskForm::Format => {
            let mut node = Properties::parse(&line[place.at + 1])?;
            match &mut node {
                Properties::Json(map) => replace_nested(map, file),
                Properties::Pairs(pairs) => replace_prefixed(pairs, file),
            }
            line[place.at + 1] = node.to_string();
        }
    }
    Ok(())
}

/// A command line whose disks are other files of the same formats: each pair has a disk's file and the one in
/// its place. Names are relative to `folder`.
///
/// # Errors
/// Where the line does not have such a disk, or has it twice, or two would be one.
pub fn with_other_disks(
    line: &[String],
    folder: &Path,
    pairs: &[(PathBuf, PathBuf)],
) -> Result<Vec<String>, Unsupported> {
    let real = |file: &Path| std::fs::canonicalize(folder.join(file)).ok();
    let places = disk_places(line)?;
    let refused = |file: &Path, why: &str| Err(Unsupported(format!("{}: {why}", file.display())));
    let mut line = line.to_vec();
    // By the line as it was: what one pair changed is none of the next one's.
    for (index, (from, to)) in pairs.iter().enumerate() {
        let wanted = real(from);
        let is_it = |place: &&DiskPlace| {
            wanted.is_some() && file_of(&place.path).and_then(|it| real(Path::new(&it))) == wanted
        };
        let mut found = places.iter().filter(is_it);
        let Some(place) = found.next() else {
            return refused(from, "no disk of its command line is that file");
        };
        if found.next().is_some() {
            return refused(from, "its command line has that disk twice");
        }
        let is_twice = |(other, there): &(PathBuf, PathBuf)| real(other) == wanted || there == to;
        if pairs[..index].iter().any(is_twice) {
            return refused(from, "it, or what is in its place, is named twice");
        }
        rename_disk(&mut line, place, &to.display().to_string())?;
    }
    Ok(line)
}

/// Puts another file of the same format in the place of a disk's.
fn rename_disk(line: &mut [String], place: &DiskPlace, file: &str) -> Result<(), Unsupported> {
    if let DiskForm::Plain = place.form {
        return replace_disk(line, place, file);
    }
    let mut options = Properties::parse(&line[place.at + 1])?;
    if matches!(place.form, DiskForm::Drive) && options.get("file", "").is_some() {
        options.set("file", file, Value::from(file));
    } else if matches!(place.form, DiskForm::Protocol { .. }) {
        options.set("filename", file, Value::from(file));
    } else {
        match &mut options {
            Properties::Json(map) => rename_nested(map, file),
            Properties::Pairs(pairs) => {
                let depth = |key: &str| key.matches("file.").count();
                let names = pairs.iter_mut().filter(|(key, _)| key.ends_with("filename"));
                if let Some((_, name)) = names.max_by_key(|(key, _)| depth(key)) {
                    *name = Some(file.to_owned());
                }
            }
        }
    }
    line[place.at + 1] = options.to_string();
    Ok(())
}

/// The same where the levels are nested.
fn rename_nested(node: &mut serde_json::Map<String, Value>, file: &str) {
    match node.get_mut("file") {
        Some(Value::Object(below)) => rename_nested(below, file),
        _ => drop(node.insert("filename".to_owned(), file.into())),
    }
}

/// Puts a qcow2 file below the filters of a node, in the place of what is there.
fn replace_nested(node: &mut serde_json::Map<String, Value>, file: &str) {
    let Some(Value::Object(below)) = node.get_mut("file") else { return };
    if below.get("file").is_some_and(Value::is_object) {
        return replace_nested(below, file);
    }
    below.insert("filename".to_owned(), file.into());
    below.insert("driver".to_owned(), "file".into());
    node.insert("driver".to_owned(), "qcow2".into());
    node.retain(|key, _| !is_of_content(key));
}

/// The same where the levels are in the keys: `file.file.filename`.
fn replace_prefixed(pairs: &mut Vec<(String, Option<String>)>, file: &str) {
    let depth =
        |key: &str| key.strip_suffix("filename").map_or(0, |it| it.matches("file.").count());
    let deepest = pairs.iter().map(|(key, _)| depth(key)).max().unwrap_or(1).max(1);
    // Of the node that is to be qcow2, and of the file below it.
    let above = "file.".repeat(deepest - 1);
    pairs.retain(|(key, _)| !key.strip_prefix(&above).is_some_and(is_of_content));
    for (key, value) in [("file.filename", file), ("file.driver", "file"), ("driver", "qcow2")] {
        let key = format!("{above}{key}");
        // The first may be the driver's name alone.
        let is_implied = key == "driver" && pairs.first().is_some_and(|(_, it)| it.is_none());
        match pairs.iter_mut().rev().find(|(it, _)| *it == key) {
            Some((_, old)) => *old = Some(value.to_owned()),
            None if is_implied => pairs[0].0 = value.to_owned(),
            None => pairs.push((key, Some(value.to_owned()))),
        }
    }
}

/// Makes the format node above protocol node `node` a qcow2 one.
fn set_format(line: &mut [String], node: &str) -> Result<(), Unsupported> {
    let above: Vec<usize> = arguments(line)
        .iter()
        .filter(|argument| argument.name == "blockdev")
        .filter(|argument| {
            argument.value.is_some_and(|value| {
                Properties::parse(value).is_ok_and(|it| it.get("file", "").as_deref() == Some(node))
            })
        })
        .map(|argument| argument.at + 1)
        .collect();
    for at in above {
        let mut format = Properties::parse(&line[at])?;
        make_qcow2(&mut format);
        line[at] = format.to_string();
    }
    Ok(())
}

fn make_qcow2(format: &mut Properties) {
    format.set_implied("driver", "qcow2");
    forget_content(format);
}

/// Whether an option says where a disk's content is, or how it is read.
fn is_of_content(key: &str) -> bool {
    const OF_CONTENT: [&str; 6] =
        ["backing", "data-file", "encrypt", "key-secret", "offset", "size"];
    OF_CONTENT
        .iter()
        .any(|it| key.strip_prefix(it).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

/// Takes away what an option says of where a disk's content is and how it is read: the
/// overlay's own header says it, and an option would be believed before it.
fn forget_content(disk: &mut Properties) {
    match disk {
        Properties::Pairs(pairs) => pairs.retain(|(key, _)| !is_of_content(key)),
        Properties::Json(map) => map.retain(|key, _| !is_of_content(key)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_disks_are_found_by_the_line_as_it_was() {
        let folder = tempfile::tempdir().expect("folder");
        for name in ["1.qcow2", "2.raw", "a,b.raw"] {
            std::fs::write(folder.path().join(name), []).expect("file");
        }
        let line = [
            "q",
            "-drive",
            "file=1.qcow2,if=virtio,format=qcow2",
            "-drive",
            "driver=raw,file.driver=file,file.filename=2.raw",
            "-blockdev",
            r#"{"driver":"raw","node-name":"n","file":{"driver":"file","filename":"a,b.raw"}}"#,
        ]
        .map(str::to_owned);
        let pair = |from: &str, to: &str| (PathBuf::from(from), PathBuf::from(to));
        let with = |pairs: &[(PathBuf, PathBuf)]| with_other_disks(&line, folder.path(), pairs);
        let there = folder.path().join("2.raw").display().to_string();
        // A chain: what is in the place of the first is the second's old name.
        let changed =
            with(&[pair("1.qcow2", &there), pair("2.raw", "/3"), pair("a,b.raw", "/c,d")]);
        let changed = changed.expect("changed").join(" ");
        for part in [
            format!("file={there},if=virtio,format=qcow2").as_str(),
            "driver=raw,file.driver=file,file.filename=/3",
            r#""filename":"/c,d""#,
            r#""driver":"raw""#,
        ] {
            assert!(changed.contains(part), "'{part}' is not in: {changed}");
        }
        for refused in [
            &[pair("3", "/x")][..],
            &[pair("1.qcow2", "/x"), pair("1.qcow2", "/y")],
            &[pair("1.qcow2", "/x"), pair("2.raw", "/x")],
        ] {
            assert!(with(refused).is_err(), "{refused:?}");
        }
    }

    #[test]
    fn names_of_disks_lead_to_their_files() {
        for (name, file) in [
            ("/a/b.qcow2", Some("/a/b.qcow2")),
            ("file:a:b.qcow2", Some("a:b.qcow2")),
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

    /// Checkpoints name disks by their numbers: what is known of a line by now must not
    /// change those that it had before.
    #[test]
    fn disks_keep_the_numbers_that_they_had() {
        let line = [
            "-drive",
            r#"file=json:{"driver":"raw",,"file":{"driver":"file",,"filename":"/a"}},readonly=on"#,
            "-drive",
            "file.filename=/new,if=none",
            "-cdrom",
            "/cd",
            "-drive",
            "file=/b",
        ];
        let places = disk_places(&line.map(str::to_owned)).expect("places");
        let paths: Vec<&str> = places.iter().map(|place| place.path.as_str()).collect();
        assert_eq!(paths, ["/a", "/b", "/cd", "/new"]);
    }

    /// However a disk is written, it is found, and another file can be put in its place.
    #[test]
    fn disks_are_found_and_replaced_in_every_spelling() {
        for (option, value, after) in [
            ("-drive", "file=/a.raw,if=virtio,format=raw", "file=/new,if=virtio,format=qcow2"),
            (
                "-drive",
                "file.driver=file,file.filename=/a.raw,driver=raw,if=virtio",
                "if=virtio,file=/new,format=qcow2",
            ),
            (
                "-drive",
                r#"file=json:{"driver":"raw",,"file":{"driver":"file",,"filename":"/a.raw"}},id=d"#,
                "file=/new,id=d,format=qcow2",
            ),
            (
                "-blockdev",
                "driver=raw,node-name=n,offset=4096,file.driver=file,file.filename=/a.raw",
                "driver=qcow2,node-name=n,file.driver=file,file.filename=/new",
            ),
            (
                "-blockdev",
                "throttle,node-name=n,throttle-group=g,file.driver=raw,file.file.driver=file,file.file.filename=/a.raw",
                "throttle,node-name=n,throttle-group=g,file.driver=qcow2,file.file.driver=file,file.file.filename=/new",
            ),
            (
                "-blockdev",
                r#"{"driver":"throttle","file":{"driver":"raw","file":{"driver":"file","filename":"/a.raw"},"size":5},"node-name":"n"}"#,
                r#"{"driver":"throttle","file":{"driver":"qcow2","file":{"driver":"file","filename":"/new"}},"node-name":"n"}"#,
            ),
        ] {
            let mut line = [option, value].map(str::to_owned).to_vec();
            let places = disk_places(&line).expect(value);
            assert_eq!(places.len(), 1, "{value}");
            assert_eq!(places[0].path, "/a.raw", "{value}");
            replace_disk(&mut line, &places[0], "/new").expect(value);
            assert_eq!(line[1], after, "{value}");
        }
    }
}
