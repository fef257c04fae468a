//! That a QEMU started with a guest's command line would open the disks that the
//! guest has now.

use crate::cmdline::disk_places;
use crate::qmp::{Qmp, QmpError};
use crate::registry::GuestRecord;
use serde_json::json;
use std::fs;
use std::path::PathBuf;

/// The first disk whose file is another than the command line says: by a
/// snapshot, a changed medium, a hot-plugged disk.
pub(crate) fn stale_disk(
    qmp: &mut Qmp,
    record: &GuestRecord,
    line: &[String],
) -> Result<Option<String>, QmpError> {
    let real = |file: &str| -> PathBuf {
        let path = record.folder.join(file);
        fs::canonicalize(&path).unwrap_or(path)
    };
    let named: Vec<PathBuf> = disk_places(line)
        .unwrap_or_default()
        .iter()
        .map(|place| real(place.path.strip_prefix("file:").unwrap_or(&place.path)))
        .collect();
    let blocks = qmp.execute("query-block", json!({}))?;
    for block in blocks.as_array().into_iter().flatten() {
        let Some(file) = block["inserted"]["file"].as_str() else { continue };
        // What is no file is opened by the same words again.
        let is_file = !file.contains("://") && !file.starts_with("json:");
        if is_file && !named.contains(&real(file)) {
            let device = block["device"].as_str().filter(|name| !name.is_empty());
            let name = device.or(block["qdev"].as_str()).unwrap_or("?");
            return Ok(Some(format!("disk '{name}' is {file} now, not what QEMU began with")));
        }
    }
    Ok(None)
}
