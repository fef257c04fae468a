//! A checkpoint as one page to look at: what was done when, what was stored,
//! and how it compares with the checkpoints before it. A [`migration`] has a page of its own.

mod chart;
mod drawing;
pub mod migration;

use crate::output::milliseconds;
use chart::{Bar, Part, bars, escape, parts, timeline};
use dewar_image::{Record, StageRecord};
use dewar_units::{ByteSize, PAGE_BYTES};
pub use drawing::Drawing;
use std::time::{Duration, UNIX_EPOCH};

const STYLE: &str = include_str!("report/style.css");

/// Stages of a checkpoint: the step that ends each, what it is called, and its
/// class in the style sheet.
const STAGES: [(&str, &str, &str); 9] = [
    ("armed", "getting ready", "quiet"),
    ("bulk-done", "pages that stand still", "bulk"),
    ("flushed", "pages written meanwhile", "epochs"),
    ("stopped", "last epochs", "epochs"),
    ("resumed", "pause", "pause"),
    ("written-behind", "writing what was captured", "behind"),
    ("disks-current", "copying disks", "disks"),
    // The name that earlier checkpoints have for it.
    ("settled", "copying disks", "disks"),
    ("synced", "waiting for the disk", "quiet"),
];

/// The whole page. `history` holds the checkpoints of the same guest up to this
/// one, oldest first.
pub fn page(record: &Record, history: &[Record]) -> String {
    let title = escape(&format!("{} of {}", record.id, record.guest));
    let body = [
        heading(record),
        figures(record),
        section("What was done when", &stages(record)),
        section("Pages written in each epoch", &epochs(record)),
        section("Pages by kind", &kinds(record)),
        section("Size of this guest's checkpoints", &sizes(record, history)),
    ]
    .concat();
    page_of(&title, &body)
}

fn page_of(title: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )
}

fn section(title: &str, content: &str) -> String {
    format!("<section>\n<h2>{title}</h2>\n{content}</section>\n")
}

fn heading(record: &Record) -> String {
    let tag = record.tag.as_deref().map_or(String::new(), |tag| format!(" '{tag}'"));
    let parent = record
        .parent
        .as_ref()
        .map_or("with all its pages".to_owned(), |parent| format!("on top of {parent}"));
    let disks = match record.disks.len() {
        1 => "1 disk".to_owned(),
        count => format!("{count} disks"),
    };
    format!(
        "<h1>Checkpoint {}{}</h1>\n<p>{} of RAM and {disks} of guest {}, {}; taken {}</p>\n",
        escape(&record.id.0),
        escape(&tag),
        ByteSize(record.memory.pages * PAGE_BYTES as u64),
        escape(&record.guest),
        escape(&parent),
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(record.created_ms)),
    )
}

fn figures(record: &Record) -> String {
    let summary = &record.summary;
    tiles(&[
        ("pause", milliseconds(summary.pause_ms)),
        ("in all", milliseconds(summary.total_ms)),
        ("stored", ByteSize(summary.stored_bytes).to_string()),
        ("shared with earlier ones", ByteSize(summary.inherited_bytes).to_string()),
    ])
}

fn tiles(figures: &[(&str, String)]) -> String {
    let tiles: String = figures
        .iter()
        .map(|(name, value)| format!("<div><b>{value}</b><span>{name}</span></div>\n"))
        .collect();
    format!("<div class=\"figures\">\n{tiles}</div>\n")
}

fn stages(record: &Record) -> String {
    let noted = |step: &str| {
        let stages = record.summary.stages.iter();
        stages.filter(|stage| stage.step == step).map(|stage: &StageRecord| stage.at_ms).next()
    };
    let at = |step: &str| match step {
        // The step is told of when it is done; the pause began before.
        "stopped" => noted("resumed").map(|at| at - record.summary.pause_ms),
        step => noted(step),
    };
    let mut parts = Vec::new();
    let mut from = 0.0;
    for (step, name, class) in STAGES {
        // Disks are copied beside what is written behind; whichever ends later
        // is seen.
        let Some(to) = at(step).filter(|to| *to > from) else { continue };
        let label = format!("{name}: {}", milliseconds(to - from));
        parts.push(Part { label, value: to - from, class });
        from = to;
    }
    if parts.is_empty() {
        return "<p>This checkpoint was taken before its stages were noted.</p>\n".to_owned();
    }
    timeline(&parts)
}

fn epochs(record: &Record) -> String {
    epoch_bars(record.summary.epochs.iter().map(|epoch| epoch.dirty_pages))
}

/// So many pages in each epoch.
fn epoch_bars(epochs: impl Iterator<Item = u64>) -> String {
    let all: Vec<Bar> = epochs
        .zip(1..)
        .map(|(pages, number)| Bar {
            label: format!("{number}"),
            title: format!("epoch {number}: {pages} pages"),
            parts: vec![(pages as f64, "epochs")],
        })
        .collect();
    bars(&all, "pages", |pages| format!("{pages:.0}"))
}

fn kinds(record: &Record) -> String {
    let counts = record.memory.counts;
    let kinds = [
        ("never touched", counts.hole, "hole"),
        ("zeros", counts.zero, "zero"),
        ("compressed", counts.compressed, "bulk"),
        ("stored as they are", counts.raw, "disks"),
        ("in the dirty store", counts.keyed, "epochs"),
        ("as before", counts.inherited, "behind"),
        ("stored elsewhere before", counts.shared, "behind"),
    ];
    let all: Vec<Part> = kinds
        .into_iter()
        .filter(|(_, pages, _)| *pages > 0)
        .map(|(name, pages, class)| Part {
            label: format!("{name}: {pages}"),
            value: pages as f64,
            class,
        })
        .collect();
    parts(&all)
}

fn sizes(record: &Record, history: &[Record]) -> String {
    let all: Vec<Bar> = history
        .iter()
        .map(|it| {
            let (own, shared) = (it.summary.stored_bytes, it.summary.inherited_bytes);
            Bar {
                label: if it.id == record.id { "this".to_owned() } else { it.id.0.clone() },
                title: format!("{}: {} own, {} shared", it.id, ByteSize(own), ByteSize(shared)),
                parts: vec![(own as f64, "bulk"), (shared as f64, "behind")],
            }
        })
        .collect();
    bars(&all, "bytes", |bytes| ByteSize(bytes as u64).to_string())
        + "<p class=\"legend\"><i class=\"bulk\"></i> its own <i class=\"behind\"></i> shared with \
           earlier ones</p>\n"
}
