//! Media that were taken out of their drives: a guest that goes on must not find them there
//! again, and boot from them.

use crate::cmdline::{Argument, Properties, arguments};
use crate::qmp::{Qmp, QmpError};
use serde_json::{Value, json};

/// What `-drive` says of a drive, not of the medium in it.
const OF_DRIVES: [&str; 6] = ["id", "if", "media", "index", "bus", "unit"];

/// A command line whose drives are empty where they are now. A drive without a name of the
/// user's that `-drive` made keeps its medium.
pub(super) fn without_ejected(qmp: &mut Qmp, line: Vec<String>) -> Result<Vec<String>, QmpError> {
    let blocks = qmp.execute("query-block", json!({}))?;
    let empty: Vec<&str> = blocks
        .as_array()
        .into_iter()
        .flatten()
        .filter(|block| block["removable"] == true && block["inserted"].is_null())
        .filter_map(|block| block["device"].as_str())
        .collect();
    if empty.is_empty() {
        return Ok(line);
    }
    // The third of a machine's drives: of those that have one to a bus, or two.
    let is_there = |name: &str| blocks.as_array().is_some_and(|all| named(all, name));
    let third = if is_there("ide2-cd0") { "ide2-cd0" } else { "ide1-cd0" };
    let mut now = Vec::new();
    for argument in arguments(&line) {
        let words = 1 + usize::from(!argument.name.is_empty() && argument.value.is_some());
        let drive = match argument.name {
            "cdrom" if empty.contains(&third) => Some("index=2,media=cdrom".to_owned()),
            "fda" if empty.contains(&"floppy0") => Some("if=floppy,index=0".to_owned()),
            "fdb" if empty.contains(&"floppy1") => Some("if=floppy,index=1".to_owned()),
            "drive" => emptied(&argument, &empty),
            _ => None,
        };
        match drive {
            Some(drive) => now.extend(["-drive".to_owned(), drive]),
            None => now.extend_from_slice(&line[argument.at..argument.at + words]),
        }
    }
    Ok(now)
}

fn named(blocks: &[Value], name: &str) -> bool {
    blocks.iter().any(|block| block["device"] == name)
}

/// A `-drive` without its medium, where it is one of the `empty`.
fn emptied(drive: &Argument<'_>, empty: &[&str]) -> Option<String> {
    let drive = Properties::parse(drive.value?).ok()?;
    let name = drive.get("id", "")?;
    if !empty.contains(&name.as_str()) || drive.get("file", "").is_none() {
        return None;
    }
    let Properties::Pairs(mut pairs) = drive else { return None };
    pairs.retain(|(key, _)| OF_DRIVES.contains(&key.as_str()));
    Some(Properties::Pairs(pairs).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_keeps_what_is_said_of_it_and_not_of_its_medium() {
        let line = ["-drive", "file=/a,,b.iso,id=cd,if=none,media=cdrom,readonly=on,format=raw"];
        let line = line.map(str::to_owned);
        let argument = arguments(&line)[0];
        assert_eq!(emptied(&argument, &["cd"]).as_deref(), Some("id=cd,if=none,media=cdrom"));
        assert_eq!(emptied(&argument, &["floppy0"]), None);
    }
}
