//! Which parts of a disk were written since a checkpoint's pause: QEMU's dirty
//! bitmaps (docs/interop/bitmaps.rst in QEMU's sources).
//!
//! In each pause, in the transaction that freezes the disk, a new bitmap begins
//! on the disk's node, named after the image in the making. What the guest
//! writes while the disk is frozen goes to the overlay; the commit brings it to
//! the disk, through the same node, so the bitmap hears of it. The bitmap of
//! the image before stays until the next checkpoint begins: should this one
//! fail, it still says what was written since that one. A bitmap lives in the
//! QEMU process; where it is missing, everything is copied.

use crate::disks::DiskError;
use crate::qmp::Qmp;
use serde_json::{Value, json};

const PREFIX: &str = "dewar-";
/// The unit of a copy, and a qcow2 cluster: what is copied is never a part of
/// one, which would have to be filled up from the file below.
pub(crate) const GRANULARITY: u64 = 64 << 10;

/// The bitmap that begins at the pause of an image.
pub(crate) fn name(image: &str) -> String {
    format!("{PREFIX}{image}")
}

/// The transaction's part that begins one.
pub(crate) fn begin_action(node: &str, image: &str) -> Value {
    let data = json!({
        "node": node, "name": name(image), "granularity": GRANULARITY, "persistent": false,
    });
    json!({"type": "block-dirty-bitmap-add", "data": data})
}

/// Removes our bitmaps of all nodes: nothing of us stays that an internal snapshot's user
/// would have to take away before going back to it.
///
/// # Errors
/// Where QEMU refuses.
pub fn remove_all(qmp: &mut Qmp) -> Result<(), DiskError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}))?;
    let names = nodes.as_array().into_iter().flatten().filter_map(|it| it["node-name"].as_str());
    names.map(str::to_owned).try_for_each(|node| keep_only(qmp, &node, None).map(drop))
}

/// Removes our bitmaps of a node, but for the one that began with image
/// `since`. Returns whether that one is there and whole.
pub(crate) fn keep_only(qmp: &mut Qmp, node: &str, since: Option<&str>) -> Result<bool, DiskError> {
    let kept = since.map(name);
    let mut whole = false;
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}))?;
    let ours = nodes.as_array().into_iter().flatten().find(|it| it["node-name"] == node);
    for bitmap in ours.and_then(|it| it["dirty-bitmaps"].as_array()).into_iter().flatten() {
        let Some(found) = bitmap["name"].as_str().filter(|it| it.starts_with(PREFIX)) else {
            continue;
        };
        if Some(found) == kept.as_deref() {
            whole = bitmap["recording"] == true
                && bitmap["inconsistent"] != true
                && bitmap["granularity"] == GRANULARITY;
        } else {
            let which = json!({"node": node, "name": found});
            qmp.execute("block-dirty-bitmap-remove", which)?;
        }
    }
    Ok(whole)
}
