//! Reservations, as they are told.

use crate::output::{percent, table};
use dewar_qos::Entry;
use serde_json::{Value, json};

/// An entry, for programs.
pub fn to_json(entry: &Entry) -> Value {
    let (seen, promise) = (&entry.seen, &entry.promise);
    json!({
        "name": entry.name, "pid": entry.process.pid, "controller": entry.controller.pid,
        "law": entry.law, "by": entry.by, "target_per_s": promise.rate,
        "miss": promise.miss, "min": promise.min, "max": promise.max, "threads": promise.threads,
        "reserved_cpus": seen.reserved, "used_cpus": seen.used,
        "demand_cpus": seen.demand,
        "headroom_cpus": (promise.most() - seen.reserved).max(0.0),
        "jobs": seen.jobs, "missed": seen.missed,
        "recent_jobs": seen.recent.0, "recent_missed": seen.recent.1,
        "rescued": seen.rescued, "refused": seen.refused, "ignored": seen.ignored,
        "heard": seen.heard,
    })
}

/// All entries, for people.
pub fn rows(entries: &[Entry]) -> String {
    let headings = [
        "name",
        ">target",
        ">reserved",
        ">used",
        ">demand",
        ">max",
        ">jobs",
        ">missed",
        ">last second",
        "by",
        "law",
    ];
    let row = |entry: &Entry| {
        let (seen, promise) = (&entry.seen, &entry.promise);
        let recent = match seen.heard {
            true => format!("{} of {}", seen.recent.1, seen.recent.0),
            false => "silent".to_owned(),
        };
        vec![
            entry.name.clone(),
            format!("{}/s", promise.rate),
            percent(seen.reserved),
            percent(seen.used),
            percent(seen.demand),
            percent(promise.most()),
            seen.jobs.to_string(),
            format!("{} ({})", seen.missed, percent(seen.missed as f64 / seen.jobs.max(1) as f64)),
            recent,
            entry.by.clone(),
            entry.law.clone(),
        ]
    };
    table(&headings, entries.iter().map(row).collect())
}

/// How many jobs there were, and how they ended.
pub fn sum(entry: &Entry) -> String {
    let seen = &entry.seen;
    let missed = seen.missed as f64 / seen.jobs.max(1) as f64;
    format!("{} jobs, {} missed ({})", seen.jobs, seen.missed, percent(missed))
}

/// One line of how a guest fares.
pub fn line(entry: &Entry) -> String {
    let seen = &entry.seen;
    format!(
        "{}  reserved {}  used {}  last second {} of {} missed  in all {}",
        entry.name,
        percent(seen.reserved),
        percent(seen.used),
        seen.recent.1,
        seen.recent.0,
        sum(entry)
    )
}
