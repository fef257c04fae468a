//! Tables and sentences.

use comfy_table::{Cell, CellAlignment, Table, presets};
use dewar_units::format_duration;
use std::fmt::Display;
use std::io::Write;
use std::time::Duration;

/// Prints a line for whoever still reads, and says whether anybody does: they may have
/// seen enough, and what was done is done.
pub fn tell(text: impl Display) -> bool {
    writeln!(std::io::stdout(), "{text}").is_ok()
}

/// A table without lines; columns whose heading begins with `>` are aligned to
/// the right.
pub fn table(headings: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(headings.iter().map(|heading| heading.trim_start_matches('>').to_uppercase()));
    for row in rows {
        table.add_row(row.into_iter().zip(headings).map(|(text, heading)| {
            let right = heading.starts_with('>');
            let alignment = if right { CellAlignment::Right } else { CellAlignment::Left };
            Cell::new(text).set_alignment(alignment)
        }));
    }
    let text = table.to_string();
    text.lines().map(|line| format!("{}\n", line.trim())).collect()
}

/// Milliseconds, as people write them.
pub fn milliseconds(ms: f64) -> String {
    format_duration(Duration::from_secs_f64(ms.max(0.0) / 1e3))
}

/// How long ago a moment in milliseconds since 1970 was.
pub fn ago(created_ms: u64) -> String {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64);
    let seconds = now.saturating_sub(created_ms) / 1000;
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

/// A share, as people write it.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent != 0.0 && percent < 10.0 {
        format!("{percent:.1} %")
    } else {
        format!("{percent:.0} %")
    }
}
