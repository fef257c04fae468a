//! Whether a QEMU sees the files and the network that we see (namespaces(7)).

use std::fs;

/// Whether a process and we are in the same namespace of a kind (namespaces(7)). One that
/// may not be looked at counts as the same: it is of another user, which is refused.
pub(crate) fn is_same_namespace(process: i32, kind: &str) -> bool {
    let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{kind}")).ok();
    of(&process.to_string()).is_none_or(|theirs| Some(theirs) == of("self"))
}
