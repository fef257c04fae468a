//! Files that a QEMU begins anew when it starts, whatever is in them.

use super::options::{Argument, Properties, arguments};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Under so many names at most what was in such a file is kept.
const MOST_KEPT: u32 = 10_000;

/// The file that an option has QEMU begin anew, and the option for people.
pub(super) fn truncated(argument: &Argument<'_>) -> Option<(String, PathBuf)> {
    let value = argument.value.unwrap_or_default();
    let properties = || Properties::parse(value).ok();
    let (option, file) = match argument.name {
        "D" => ("-D".to_owned(), value.to_owned()),
        "trace" => ("-trace".to_owned(), properties()?.get("file", "")?),
        "object" => {
            let object = properties()?;
            let kind = object.get("qom-type", "qom-type").filter(|kind| kind == "filter-dump")?;
            (format!("-object {kind}"), object.get("file", "")?)
        }
        "device" => {
            let device = properties()?;
            let kind = device.get("driver", "driver").unwrap_or_default();
            (format!("-device {kind},pcap="), device.get("pcap", "")?)
        }
        _ => return None,
    };
    Some((option, file.into()))
}

/// Keeps what is in the files that a QEMU started with `line` in `folder` would begin anew:
/// as `FILE.1`, or what number is free.
///
/// # Errors
/// Where one cannot be renamed.
pub(crate) fn keep_truncated(line: &[String], folder: &Path) -> io::Result<()> {
    for (_, file) in arguments(line).iter().filter_map(truncated) {
        let path = folder.join(file);
        let has_something = fs::metadata(&path).is_ok_and(|data| data.is_file() && data.len() > 0);
        if !has_something {
            continue;
        }
        let numbered = |number: u32| PathBuf::from(format!("{}.{number}", path.display()));
        let mut names = (1..MOST_KEPT).map(numbered);
        let free = names.find(|name| fs::symlink_metadata(name).is_err());
        fs::rename(&path, free.ok_or(io::ErrorKind::AlreadyExists)?)?;
    }
    Ok(())
}
