//! Tables and sentences.

use comfy_table::{Cell, CellAlignment, Table, presets};
use dewar_units::format_duration;
use std::borrow::Cow;
use std::fmt::Display;
use std::io::Write;
use std::time::Duration;

/// Prints a line, and says whether anybody still reads: they may have
/// seen enough, and what was done is done.
pub fn tell(text: impl Display) -> bool {
    writeln!(std::io::stdout(), "{}", printable(&text.to_string())).is_ok()
}

/// A text without what a terminal obeys, or what makes it look like another: names, tags and
/// messages come from records, servers and guests. It is escaped as JSON does, so that JSON
/// stays what it was.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_plain = |letter: char| matches!(letter, '\n' | '\t') || !is_command(letter);
    if text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    let escaped = |letter: char| match is_plain(letter) {
        true => letter.to_string(),
        false => format!("\\u{:04x}", u32::from(letter)),
    };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// Somebody else's words in a sentence or a table of ours: in one line, and no longer than
/// people read.
pub fn foreign(text: &str) -> String {
    const MOST: usize = 200;
    let line: String =
        text.chars().take(MOST).map(|it| if is_command(it) { '?' } else { it }).collect();
    if text.chars().nth(MOST).is_some() { format!("{line}…") } else { line }
}

/// Control characters, and those that change the direction of what follows.
fn is_command(letter: char) -> bool {
    let turns = ['\u{200e}'..='\u{200f}', '\u{202a}'..='\u{202e}', '\u{2066}'..='\u{2069}'];
    letter.is_control()
        || matches!(letter, '\u{2028}' | '\u{2029}' | '\u{feff}')
        || turns.iter().any(|range| range.contains(&letter))
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
    fn nothing_that_a_terminal_obeys_is_printed() {
        let told = "a\u{1b}[31mb\u{9b}c\u{202e}d\nnext\ttab";
        assert_eq!(printable(told), "a\\u001b[31mb\\u009bc\\u202ed\nnext\ttab");
        assert_eq!(printable("größer"), "größer");
        assert_eq!(foreign("a\nb\u{1b}"), "a?b?");
        assert_eq!(foreign(&"x".repeat(300)).chars().count(), 201);
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
