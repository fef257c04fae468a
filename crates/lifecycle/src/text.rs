//! Words from records, servers and guests, made fit to be shown.

use std::borrow::Cow;

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

/// Words of another program in a sentence of ours: in one line, and no longer than people read.
pub fn foreign(text: &str) -> String {
    const MOST: usize = 200;
    let line: String =
        text.chars().take(MOST).map(|it| if is_command(it) { '?' } else { it }).collect();
    if text.chars().nth(MOST).is_some() { format!("{line}…") } else { line }
}

/// Whether a terminal obeys a character: control characters, and those that change the direction of
/// what follows.
pub fn is_command(letter: char) -> bool {
    let turns = ['\u{200e}'..='\u{200f}', '\u{202a}'..='\u{202e}', '\u{2066}'..='\u{2069}'];
    letter.is_control()
        || matches!(letter, '\u{2028}' | '\u{2029}' | '\u{feff}')
        || turns.iter().any(|range| range.contains(&letter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_left() {
        let words = "a\u{1b}[31mb\u{9b}c\u{202e}d\nnext\ttab";
        assert_eq!(printable(words), "a\\u001b[31mb\\u009bc\\u202ed\nnext\ttab");
        assert_eq!(printable("größer"), "größer");
        assert_eq!(foreign("a\nb\u{1b}"), "a?b?");
        assert_eq!(foreign(&"x".repeat(300)).chars().count(), 201);
    }
}
