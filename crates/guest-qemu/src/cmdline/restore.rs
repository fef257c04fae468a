//! The command line of a restored guest: the user's own, with other RAM files
//! and other disk files.

use super::exclusive::{Descriptors, take_over};
use super::heartbeats::{PORT_FILE, move_heartbeats};
use super::memory::{RunPlan, plan_run};
use super::options::{Properties, Unsupported, arguments};
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
    /// `-blockdev driver=qcow2,file.filename=FILE,…`, format and protocol.
    Format,
}

/// The disk files of a command line. Checkpoints name disks by their numbers here, so
/// that what a later version came to know of (media that can be taken out) comes last.
///
/// # Errors
/// Where an option cannot be read.
pub fn disk_places(line: &[String]) -> Result<Vec<DiskPlace>, Unsupported> {
    let (mut places, mut media) = (Vec::new(), Vec::new());
    for argument in arguments(line) {
        let value = argument.value.unwrap_or_default();
        let (path, form) = match argument.name {
            "" | "hda" | "hdb" | "hdc" | "hdd" | "cdrom" | "fda" | "fdb" | "sd" | "mtdblock"
            | "pflash" => (Some(value.to_owned()), DiskForm::Plain),
            "drive" => (Properties::parse(value)?.get("file", ""), DiskForm::Drive),
            "blockdev" => {
                let node = Properties::parse(value)?;
                let name = node.get("node-name", "").unwrap_or_default();
                match node.get("filename", "") {
                    Some(path) => (Some(path), DiskForm::Protocol { node: name }),
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
    Ok(places)
}

fn nested_filename(node: &Properties) -> Option<String> {
    match node {
        Properties::Json(map) => Some(map.get("file")?.get("filename")?.as_str()?.to_owned()),
        pairs => pairs.get("file.filename", ""),
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
    let places = disk_places(&line)?;
    for (index, overlay) in overlays {
        if let Some(place) = places.get(*index) {
            replace_disk(&mut line, place, &overlay.display().to_string())?;
        }
    }
    move_heartbeats(&mut line, &qmp.with_file_name(PORT_FILE))?;
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

fn replace_disk(line: &mut [String], place: &DiskPlace, file: &str) -> Result<(), Unsupported> {
    match &place.form {
        DiskForm::Plain if line[place.at].starts_with('-') => line[place.at + 1] = file.to_owned(),
        DiskForm::Plain => line[place.at] = file.to_owned(),
        DiskForm::Drive => {
            let mut drive = Properties::parse(&line[place.at + 1])?;
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
            let mut format = Properties::parse(&line[place.at + 1])?;
            match &mut format {
                Properties::Json(map) => {
                    map["file"]["filename"] = Value::from(file);
                    map["file"]["driver"] = Value::from("file");
                }
                pairs => {
                    pairs.set("file.filename", file, Value::Null);
                    pairs.set("file.driver", "file", Value::Null);
                }
            }
            make_qcow2(&mut format);
            line[place.at + 1] = format.to_string();
        }
    }
    Ok(())
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

/// Takes away what an option says of where a disk's content is and how it is read: the
/// overlay's own header says it, and an option would be believed before it.
fn forget_content(disk: &mut Properties) {
    const OF_CONTENT: [&str; 6] =
        ["backing", "data-file", "encrypt", "key-secret", "offset", "size"];
    let is_of_content = |key: &str| {
        OF_CONTENT.iter().any(|it| {
            key.strip_prefix(it).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    };
    match disk {
        Properties::Pairs(pairs) => pairs.retain(|(key, _)| !is_of_content(key)),
        Properties::Json(map) => map.retain(|key, _| !is_of_content(key)),
    }
}
