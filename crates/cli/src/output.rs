//! Tables and sentences.

use comfy_table::{Cell, CellAlignment, Table, presets};
use dewar_lifecycle::Failure;
use dewar_lifecycle::text::{is_command, printable};
use dewar_units::format_duration;
use serde_json::json;
use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

/// Prints a line, and says whether anybody still reads: they may have
/// seen enough, and what was done is done.
pub fn print(text: impl Display) -> bool {
    writeln!(std::io::stdout(), "{}", printable(&text.to_string())).is_ok()
}

/// Writes a line for people beside the result. Nobody may be there to read it.
pub fn warn(text: &str) {
    let _ = writeln!(std::io::stderr(), "dewar: {}", printable(text));
}

/// Tells a failure that is beside a command which goes on.
pub fn note(failure: &Failure) {
    warn(&format!("beside this: {}", failure.whole()));
}

/// Tells why a command failed, and gives its exit code.
pub fn report(failure: &Failure, json: bool) -> ExitCode {
    warn(&failure.whole());
    if json && !failure.is_printed() {
        print(failure.beside(json!({})));
    }
    ExitCode::from(failure.code() as u8)
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
            Cell::new(foreign_cell(text)).set_alignment(alignment)
        }));
    }
    let text = table.to_string();
    text.lines().map(|line| format!("{}\n", line.trim())).collect()
}

/// A cell's text, in which nothing begins another line or row.
fn foreign_cell(text: String) -> String {
    text.replace(is_command, "?")
}

/// Milliseconds, as people write them.
pub fn milliseconds(ms: f64) -> String {
    let time = Duration::try_from_secs_f64(ms.max(0.0) / 1e3);
    time.map_or_else(|_| "for ever".to_owned(), format_duration)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_cell_begins_a_row() {
        let shown = table(&["tag"], vec![vec!["one\nforged".to_owned()]]);
        assert_eq!(shown.lines().count(), 2);
    }

    #[test]
    fn no_number_is_too_large_to_be_told() {
        for ms in [f64::NAN, f64::INFINITY, 1e300, -1.0] {
            milliseconds(ms);
        }
    }
}
