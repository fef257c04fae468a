//! Checkpoints, as they are told.

use crate::output::milliseconds;
use dewar_checkpoint::CheckpointOutcome;
use dewar_guest_qemu::start_from_state::excluded_disks;
use dewar_image::{EpochRecord, Record, StageRecord, Store};
use dewar_lifecycle::text::foreign;
use dewar_units::{ByteSize, PAGE_BYTES};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// So many disks take longer to be put aside than anything else in a pause.
const MANY_DISKS: usize = 8;

/// A checkpoint, for programs.
pub fn to_json(record: &Record, store: &Store) -> Value {
    let counts = record.memory.counts;
    let dirty_stores: BTreeSet<&str> = record.keyed.values().map(|it| it.store.as_str()).collect();
    json!({
        "checkpoint": record.id,
        "guest": record.guest,
        "memory_bytes": record.memory.pages * PAGE_BYTES as u64,
        "pages": {
            "total": record.memory.pages,
            "zero": counts.zero + counts.hole,
            "stored": counts.compressed + counts.raw + counts.keyed,
            "hole": counts.hole,
            "compressed": counts.compressed,
            "raw": counts.raw,
            "dirty_store": counts.keyed,
            "unchanged": counts.inherited,
            "duplicate": record.summary.duplicate_pages,
        },
        "parent": record.parent,
        "stored_bytes": record.summary.stored_bytes,
        "shared_bytes": record.summary.inherited_bytes,
        "pause_ms": record.summary.pause_ms,
        "total_ms": record.summary.total_ms,
        "captured": record.summary.captured,
        "epochs": record.summary.epochs,
        "stages": record.summary.stages,
        "tag": record.tag,
        "store": store.url(),
        "dirty_stores": dirty_stores,
        "created_ms": record.created_ms,
        "disks": record.disks.len(),
        "excluded": excluded_disks(&record.machine),
    })
}

/// Its tag, behind a space; nothing where it has none.
fn quoted_tag(record: &Record) -> String {
    record.tag.as_ref().map_or(String::new(), |tag| format!(" '{}'", foreign(tag)))
}

/// A checkpoint of a container that was taken, for people.
pub fn describe_container(record: &Record, store: &str) -> String {
    let (summary, counts) = (&record.summary, record.memory.counts);
    let tag = quoted_tag(record);
    format!(
        "{}{tag} of {}: {} of memory in {}, {} stored in {store}\n\
         paused {}; of {} pages {} stored, {} known before, {} zero",
        record.id,
        record.guest,
        ByteSize(record.memory.pages * PAGE_BYTES as u64),
        milliseconds(summary.total_ms),
        ByteSize(summary.stored_bytes),
        milliseconds(summary.pause_ms),
        record.memory.pages,
        counts.compressed + counts.raw,
        counts.inherited + counts.shared,
        counts.zero + counts.hole,
    )
}

/// A checkpoint that was taken, for people.
pub fn describe(taken: &CheckpointOutcome, store: &str, max_pause: Duration) -> String {
    let record = &taken.record;
    let summary = &record.summary;
    let counts = record.memory.counts;
    let stored = counts.compressed + counts.raw + counts.keyed;
    let disks = match record.disks.len() {
        0 => String::new(),
        1 => " and 1 disk".to_owned(),
        count => format!(" and {count} disks"),
    };
    let tag = quoted_tag(record);
    let mut text = format!(
        "{}{tag} of {}: {} of RAM{disks} in {}, {} stored in {store}\n\
         paused {}, after {}; of {} pages {} stored, {} zero, {} never touched",
        record.id,
        record.guest,
        ByteSize(record.memory.pages * PAGE_BYTES as u64),
        milliseconds(summary.total_ms),
        ByteSize(summary.stored_bytes),
        milliseconds(summary.pause_ms),
        epochs(&summary.epochs),
        record.memory.pages,
        stored,
        counts.zero,
        counts.hole,
    );
    if counts.keyed > 0 {
        let own = record.keyed.values().find(|source| source.image == record.id);
        let store = own.map_or("the dirty store", |source| source.store.as_str());
        let sent = summary.captured.dirty_store + summary.captured.spread;
        text.push_str(&format!("\n{} of them in {store}, of {sent} sent there", counts.keyed));
    }
    let excluded = excluded_disks(&record.machine);
    if !excluded.is_empty() {
        text.push_str(&format!("\nleft out: {}", foreign(&excluded.join(", "))));
    }
    if let Some(parent) = &record.parent {
        let how =
            if taken.by_tracking { "known by tracking since" } else { "found by comparing with" };
        text.push_str(&format!("\n{} pages as in {parent}, {how} it", counts.inherited));
    }
    if summary.duplicate_pages > 0 {
        text.push_str(&format!("\n{} pages are stored elsewhere already", summary.duplicate_pages));
    }
    if summary.pause_ms > max_pause.as_secs_f64() * 1e3 {
        let limit = dewar_units::format_duration(max_pause);
        text.push_str(&format!("\nthe pause was longer than --max-pause {limit}: "));
        let last = summary.epochs.last().map_or(0, |epoch| epoch.dirty_pages);
        text.push_str(&why_so_long(&summary.stages, record.disks.len(), last));
        if summary.captured.overflowed > 0 {
            let over = summary.captured.overflowed;
            text.push_str(&format!(", and {over} found no room: a larger --buffer may help"));
        }
    }
    text
}

/// What of a pause took longest, of a guest with so many disks that wrote so many pages in the last epoch before it.
fn why_so_long(stages: &[StageRecord], disks: usize, last: u64) -> String {
    let from = stages.iter().position(|it| it.step == "stopping").unwrap_or(stages.len());
    let steps = stages[from..].windows(2).take_while(|pair| pair[0].step != "resumed");
    let of = |pair: &[StageRecord]| pair[1].at_ms - pair[0].at_ms;
    let longest = steps.max_by(|one, other| of(one).total_cmp(&of(other)));
    match longest {
        Some(pair) if pair[1].step == "state-saved" && disks > MANY_DISKS => format!(
            "QEMU took {} to put its {disks} disks aside and to save its devices",
            milliseconds(of(pair)),
        ),
        Some(pair) if pair[1].step == "state-saved" => format!(
            "QEMU took {} to save its devices, with the memory of a display if it has one",
            milliseconds(of(pair))
        ),
        Some(pair) if last == 0 => {
            format!("{} of it went by until '{}'", milliseconds(of(pair)), pair[1].step)
        }
        _ => format!("the guest still wrote {last} pages in the last epoch"),
    }
}

/// How many epochs there were, and of how many pages the last ones.
fn epochs(all: &[EpochRecord]) -> String {
    const TOLD: usize = 4;
    let last = &all[all.len().saturating_sub(TOLD)..];
    let pages: Vec<String> = last.iter().map(|epoch| epoch.dirty_pages.to_string()).collect();
    let more = if all.len() > TOLD { "… " } else { "" };
    match all.len() {
        1 => format!("1 epoch of {} pages", pages[0]),
        count => format!("{count} epochs of {more}{} pages", pages.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_pause_is_told_with_what_took_longest() {
        let of = |saved: f64, captured: f64| {
            let steps = [
                ("flushed", 0.0),
                ("stopping", 90.0),
                ("stopped", 91.0),
                ("state-saved", 91.0 + saved),
                ("captured", 91.0 + saved + captured),
                ("resumed", 92.0 + saved + captured),
                ("synced", 9000.0),
            ];
            steps.map(|(step, at_ms)| StageRecord { step: step.to_owned(), at_ms }).to_vec()
        };
        assert!(why_so_long(&of(40.0, 5.0), 1, 0).starts_with("QEMU took 40.0 ms to save its"));
        assert!(why_so_long(&of(40.0, 5.0), 99, 7).contains("its 99 disks aside"));
        assert!(why_so_long(&of(4.0, 50.0), 1, 7).contains("still wrote 7 pages"));
        assert!(
            why_so_long(&of(4.0, 50.0), 1, 0).contains("50.0 ms of it went by until 'captured'")
        );
    }
}
