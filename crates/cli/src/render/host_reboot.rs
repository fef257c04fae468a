//! What `host-reboot` tells.

use crate::output::{milliseconds, table};
use dewar_lifecycle::host_reboot::{Fallback, How, Note, Outcome, Plan};
use dewar_units::ByteSize;
use serde_json::{Value, json};

/// How long a part of an outage took, where both ends are known.
fn between(start: Option<u64>, end: Option<u64>) -> Option<f64> {
    Some(end?.saturating_sub(start?) as f64)
}

/// The parts of an outage, in milliseconds, by the host's clock: each with its name.
fn parts(note: &Note) -> Vec<(&'static str, f64)> {
    let new_kernel = note.booted_for_ms.map(|ms| ms as f64);
    let reboot = between(note.left_ms, note.arrived_ms);
    let old_kernel = reboot.zip(new_kernel).map(|(all, new)| (all - new).max(0.0));
    let parts = [
        ("old kernel's end", old_kernel),
        ("new kernel and init", new_kernel),
        ("thawing", between(note.arrived_ms, note.back_ms)),
    ];
    parts.into_iter().filter_map(|(name, ms)| Some((name, ms?))).collect()
}

fn parts_json(note: &Note) -> Value {
    let keys = ["old_kernel_ms", "new_kernel_ms", "thaw_ms"];
    let all = parts(note).into_iter().zip(keys);
    all.map(|((_, ms), key)| (key.to_owned(), json!(ms))).collect::<serde_json::Map<_, _>>().into()
}

fn how(how: How) -> (&'static str, &'static str) {
    match how {
        How::Kept => ("kept", "keeps its memory where it is"),
        How::StaysFrozen => ("stays_frozen", "is frozen, and stays so"),
        How::Store => ("store", "is frozen into the default store"),
        How::Stop => ("stop", "is shut down"),
    }
}

pub fn plan_json(plan: &Plan) -> Value {
    let guests = plan
        .guests
        .iter()
        .map(|it| json!({"name": it.name, "memory_bytes": it.memory_bytes, "how": how(it.how).0}));
    let memory = plan.mounts.iter().map(|mount| {
        json!({"folder": mount.point, "device": mount.device, "start": mount.memory.start,
            "bytes": mount.memory.bytes, "command_line": mount.by_command_line})
    });
    json!({
        "kernel": plan.kernel.path, "version": plan.kernel.version, "initrd": plan.initrd,
        "command_line": plan.line.text(), "guests": guests.collect::<Vec<_>>(),
        "memory": memory.collect::<Vec<_>>(), "refusals": plan.refusals, "warnings": plan.warnings,
        "fallback": plan.fallback == Fallback::Checkpoint, "checksums": plan.checksums,
        "last": plan.last.as_ref().map(parts_json),
    })
}

pub fn plan_text(plan: &Plan) -> String {
    let mut text =
        format!("new kernel: Linux {}, {}\n", plan.kernel.version, plan.kernel.path.display());
    if let Some(initrd) = &plan.initrd {
        text.push_str(&format!("initramfs: {}\n", initrd.display()));
    }
    text.push_str(&format!("command line: {}\n", plan.line.text()));
    for mount in &plan.mounts {
        let (point, bytes) = (mount.point.display(), ByteSize(mount.memory.bytes));
        text.push_str(&format!("memory: {point} lies in {bytes} at {:#x}\n", mount.memory.start));
    }
    let rows = plan.guests.iter().map(|it| {
        vec![it.name.clone(), ByteSize(it.memory_bytes).to_string(), how(it.how).1.to_owned()]
    });
    if !plan.guests.is_empty() {
        text.push_str(&table(&["guest", ">memory", "what becomes of it"], rows.collect()));
    }
    if plan.fallback == Fallback::Checkpoint {
        text.push_str("a checkpoint of each guest that is kept is taken first\n");
    }
    text.push_str(&predicted(plan.last.as_ref()));
    plan.warnings.iter().for_each(|it| text.push_str(&format!("note: {it}\n")));
    plan.refusals.iter().for_each(|it| text.push_str(&format!("in the way: {it}\n")));
    text
}

fn predicted(last: Option<&Note>) -> String {
    let parts = last.map(parts).unwrap_or_default();
    if parts.is_empty() {
        return "how long the guests will be away is not known: this host was not rebooted so before\n".to_owned();
    }
    let all: Vec<String> =
        parts.iter().map(|(name, ms)| format!("{name} {}", milliseconds(*ms))).collect();
    format!("the last time it took: {}\n", all.join(", "))
}

pub fn note_json(note: &Note) -> Value {
    let guests = note.guests.iter().map(|it| match &it.outcome {
        Some(Outcome::Back { outage_ms }) => {
            json!({"name": it.name, "state": "back", "outage_ms": outage_ms})
        }
        Some(Outcome::Restored { lost }) => {
            json!({"name": it.name, "state": "restored", "checkpoint": it.fallback, "lost": lost})
        }
        Some(Outcome::Failed { why }) => json!({"name": it.name, "state": "failed", "why": why}),
        None => json!({"name": it.name, "state": "unknown"}),
    });
    json!({"rebooted": true, "version": note.kernel, "guests": guests.collect::<Vec<_>>(),
        "parts": parts_json(note)})
}

pub fn note_text(note: &Note) -> String {
    let rows = note.guests.iter().map(|it| {
        let outcome = match &it.outcome {
            Some(Outcome::Back { outage_ms }) => {
                format!("goes on after {}", milliseconds(*outage_ms as f64))
            }
            Some(Outcome::Restored { lost }) => {
                format!("goes on from its checkpoint, as its memory was lost: {lost}")
            }
            Some(Outcome::Failed { why }) => why.clone(),
            None => "is not known of".to_owned(),
        };
        vec![it.name.clone(), outcome]
    });
    let parts: Vec<String> =
        parts(note).iter().map(|(name, ms)| format!("{name} {}", milliseconds(*ms))).collect();
    format!("{}{}", table(&["guest", ""], rows.collect()), parts.join(", "))
}
