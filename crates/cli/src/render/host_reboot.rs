//! What `host-reboot` tells.

use crate::output::{milliseconds, table};
use dewar_lifecycle::host_reboot::{Fallback, How, Note, Outcome, Plan};
use dewar_units::ByteSize;
use serde_json::{Value, json};

/// A clock that is wrong by more millionths is told of: NTP corrects up to 500, and KVM itself bears 250 (`tsc_tolerance_ppm`).
const DRIFT_PPM: i64 = 250;

/// How long a part of an outage took, where both ends are known.
fn between(start: Option<u64>, end: Option<u64>) -> Option<f64> {
    Some(end?.saturating_sub(start?) as f64)
}

/// The parts of an outage, in milliseconds, by the host's clock: each with its name, and for programs.
fn parts(note: &Note) -> Vec<(&'static str, &'static str, f64)> {
    let new_kernel = note.times.booted_for_ms.map(|ms| ms as f64);
    let reboot = between(note.times.left_ms, note.times.arrived_ms);
    let old_kernel = reboot.zip(new_kernel).map(|(all, new)| (all - new).max(0.0));
    let parts = [
        ("freezing", "freeze_ms", between(note.times.stopped_ms, note.times.left_ms)),
        ("old kernel's end", "old_kernel_ms", old_kernel),
        ("new kernel and init", "new_kernel_ms", new_kernel),
        ("thawing", "thaw_ms", between(note.times.arrived_ms, note.times.back_ms)),
    ];
    parts.into_iter().filter_map(|(name, key, ms)| Some((name, key, ms?))).collect()
}

fn parts_json(note: &Note) -> Value {
    let all = parts(note).into_iter().map(|(_, key, ms)| (key.to_owned(), json!(ms)));
    Value::Object(all.collect())
}

/// The same for people.
fn parts_text(note: &Note) -> String {
    let all = parts(note).into_iter().map(|(name, _, ms)| format!("{name} {}", milliseconds(ms)));
    all.collect::<Vec<_>>().join(", ")
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
    match last.map(parts_text) {
        Some(parts) if !parts.is_empty() => format!("the last time it took: {parts}\n"),
        _ => {
            "how long the guests will be away is not known: this host was not rebooted so before\n"
                .to_owned()
        }
    }
}

pub fn note_json(note: &Note) -> Value {
    let guests = note.guests.iter().map(|it| match &it.outcome {
        Some(Outcome::Back { outage_ms, .. }) => {
            json!({"name": it.name, "state": "back", "outage_ms": outage_ms})
        }
        Some(Outcome::RunsAlready { .. }) => json!({"name": it.name, "state": "running"}),
        Some(Outcome::Restored { lost, .. }) => {
            json!({"name": it.name, "state": "restored", "checkpoint": it.fallback, "lost": lost})
        }
        Some(Outcome::Failed { why }) => json!({"name": it.name, "state": "failed", "why": why}),
        None => json!({"name": it.name, "state": "unknown"}),
    });
    json!({"rebooted": true, "version": note.kernel, "guests": guests.collect::<Vec<_>>(),
        "parts": parts_json(note), "tsc_faster_ppm": note.tsc_faster_ppm})
}

pub fn note_text(note: &Note) -> String {
    let rows = note.guests.iter().map(|it| {
        let outcome = match &it.outcome {
            Some(Outcome::Back { outage_ms, .. }) => {
                format!("goes on after {}", milliseconds(*outage_ms as f64))
            }
            Some(Outcome::RunsAlready { .. }) => "runs already".to_owned(),
            Some(Outcome::Restored { lost, .. }) => {
                format!("goes on from its checkpoint, as its memory was lost: {lost}")
            }
            Some(Outcome::Failed { why }) => why.clone(),
            None => "is not known of".to_owned(),
        };
        vec![it.name.clone(), outcome]
    });
    let drift = note.tsc_faster_ppm.filter(|ppm| ppm.abs() > DRIFT_PPM).map_or_else(String::new, |ppm| {
        format!(
            "\nnote: this kernel found the time stamp counter to count {ppm} millionths faster; where KVM cannot scale it \
             (tsc_scale in /proc/cpuinfo), the guests' clocks drift by as much"
        )
    });
    format!("{}{}{drift}", table(&["guest", ""], rows.collect()), parts_text(note))
}
