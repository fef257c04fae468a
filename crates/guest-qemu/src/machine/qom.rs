//! QEMU's tree of objects: where devices are in it, and how a property is asked for.

use serde_json::{Value, json};

/// Where QEMU keeps devices with a name.
pub(super) const NAMED: &str = "/machine/peripheral";
/// Where it keeps those without: it calls them `device[0]`, `device[1]` and so on.
pub(super) const NAMELESS: &str = "/machine/peripheral-anon";

/// The arguments of a question for a property.
pub(super) fn get(path: &str, property: &str) -> Value {
    json!({"path": path, "property": property})
}
