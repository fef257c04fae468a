//! A guest's move to another host as one page to look at.

use super::chart::{Part, escape, parts, timeline};
use super::{epoch_bars, page_of, section, tiles};
use crate::output::milliseconds;
use dewar_lifecycle::migrate::Migrated;
use dewar_units::{ByteSize, PAGE_BYTES};
use std::time::Duration;

/// The whole page.
pub fn page(name: &str, other: &str, moved: &Migrated) -> String {
    let title = escape(&format!("{name} moved to {other}"));
    let memory = ByteSize(moved.pages * PAGE_BYTES as u64);
    let body = [
        format!("<h1>{title}</h1>\n<p>{memory} of memory, each page as often as it was sent</p>\n"),
        tiles(&[
            ("it stood still for", ms(moved.gap)),
            ("in all", ms(moved.total)),
            ("sent", ByteSize(moved.bytes).to_string()),
            ("of device state", ByteSize(moved.state_bytes).to_string()),
        ]),
        section("What was done when", &stages(moved)),
        section("Pages written while others were sent", &epoch_bars(moved.epochs.iter().copied())),
        section("Pages that were sent", &kinds(moved)),
    ];
    page_of(&title, &body.concat())
}

fn ms(time: Duration) -> String {
    milliseconds(time.as_secs_f64() * 1e3)
}

fn stages(moved: &Migrated) -> String {
    let stages = &moved.stages;
    let all = [
        (stages.reached, "reaching the other host", "quiet"),
        (stages.memory_sent, "pages that stand still", "bulk"),
        (stages.stopped, "what was written meanwhile", "epochs"),
        (stages.runs_there, "it stands still", "pause"),
        (moved.total, if moved.post_copy_pages > 0 { "the rest" } else { "the end" }, "behind"),
    ];
    let mut from = Duration::ZERO;
    let part = |(to, name, class): (Duration, &str, &'static str)| {
        let time = to.saturating_sub(std::mem::replace(&mut from, to));
        Part { label: format!("{name}: {}", ms(time)), value: time.as_secs_f64(), class }
    };
    timeline(&all.map(part))
}

fn kinds(moved: &Migrated) -> String {
    let otherwise = moved.same_pages + moved.delta_pages + moved.post_copy_pages;
    let whole = moved.pages.saturating_sub(otherwise);
    let kinds = [
        ("by themselves", whole, "bulk"),
        ("the same as another", moved.same_pages, "zero"),
        ("what differs from the version before", moved.delta_pages, "epochs"),
        ("when it ran there already", moved.post_copy_pages, "behind"),
    ];
    let sent = kinds.into_iter().filter(|(_, pages, _)| *pages > 0);
    let part = |(name, pages, class)| Part {
        label: format!("{name}: {pages}"),
        value: pages as f64,
        class,
    };
    parts(&sent.map(part).collect::<Vec<_>>())
}
