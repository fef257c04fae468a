//! Command lines of kernels, as Documentation/admin-guide/kernel-parameters.rst has them.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::io;

/// The kernel's own, as it was booted.
const PRESENT: &str = "/proc/cmdline";
/// What boot loaders add, and says nothing to a kernel.
const OF_BOOT_LOADERS: [&str; 2] = ["BOOT_IMAGE", "initrd"];

/// The command line of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine(String);

/// RAM that a kernel is told to take for persistent memory: `memmap=BYTES!START`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Reservation {
    /// Its first physical address.
    pub start: u64,
    /// Its size.
    pub bytes: u64,
}

impl Reservation {
    /// Whether this has all of that.
    pub fn covers(&self, other: &Self) -> bool {
        let end = |it: &Self| it.start.checked_add(it.bytes);
        match (end(self), end(other)) {
            (Some(own), Some(others)) => self.start <= other.start && others <= own,
            _ => false,
        }
    }
}

impl fmt::Display for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memmap={}!{:#x}", short(self.bytes), self.start)
    }
}

/// A size as the kernel takes it, with the largest unit that divides it.
fn short(bytes: u64) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let unit = units.iter().find(|(shift, _)| bytes != 0 && bytes % (1 << shift) == 0);
    unit.map_or_else(|| bytes.to_string(), |(shift, name)| format!("{}{name}", bytes >> shift))
}

impl CommandLine {
    /// That of the kernel that runs, without what its boot loader added.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn present() -> io::Result<Self> {
        let text = fs::read_to_string(PRESENT)?;
        let is_ours = |word: &&str| {
            !OF_BOOT_LOADERS.iter().any(|it| word.strip_prefix(it).is_some_and(starts_value))
        };
        Ok(Self(words(&text).filter(is_ours).collect::<Vec<_>>().join(" ")))
    }

    /// One that a person wrote.
    pub fn new(text: &str) -> Self {
        Self(words(text).collect::<Vec<_>>().join(" "))
    }

    /// Its text.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// The RAM that it sets aside as persistent memory. What the kernel would not understand is left out, as
    /// the kernel does.
    pub fn reservations(&self) -> Vec<Reservation> {
        let values = words(&self.0).filter_map(|word| {
            // The kernel takes the quotes away, around the word or around its value.
            Some(word.trim_matches('"').strip_prefix("memmap=")?.trim_matches('"'))
        });
        values.flat_map(|value| value.split(',')).filter_map(reservation).collect()
    }

    /// What its last `NAME=VALUE` says, which is the one that holds.
    pub fn value(&self, name: &str) -> Option<&str> {
        let value = |word| str::strip_prefix(word, name)?.strip_prefix('=');
        words(&self.0).filter_map(value).last()
    }
}

fn starts_value(rest: &str) -> bool {
    rest.starts_with('=')
}

/// The words of a line. Quotes keep blanks within one word, as for the kernel (`next_arg`, lib/cmdline.c).
fn words(line: &str) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    let split = move |letter: char| {
        is_quoted ^= letter == '"';
        letter.is_whitespace() && !is_quoted
    };
    line.split(split).filter(|word| !word.is_empty())
}

/// `BYTES!START`.
fn reservation(text: &str) -> Option<Reservation> {
    let (bytes, start) = text.split_once('!')?;
    let reservation = Reservation { start: number(start)?, bytes: number(bytes)? };
    (reservation.bytes > 0).then_some(reservation)
}

/// A number as the kernel's `memparse` reads it (lib/cmdline.c): decimal, octal or hexadecimal, with a unit.
fn number(text: &str) -> Option<u64> {
    let (digits, shift) = match text.char_indices().last()? {
        (at, 'K' | 'k') => (&text[..at], 10),
        (at, 'M' | 'm') => (&text[..at], 20),
        (at, 'G' | 'g') => (&text[..at], 30),
        (at, 'T' | 't') => (&text[..at], 40),
        _ => (text, 0),
    };
    let (digits, radix) = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None if digits.len() > 1 && digits.starts_with('0') => (&digits[1..], 8),
        None => (digits, 10),
    };
    // A sign is none of the kernel's.
    let digits = Some(digits).filter(|it| it.chars().all(|digit| digit.is_digit(radix)))?;
    u64::from_str_radix(digits, radix).ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(line: &str) -> Vec<Reservation> {
        CommandLine::new(line).reservations()
    }

    #[test]
    fn reservations_are_read_as_the_kernel_does() {
        let one = Reservation { start: 4 << 30, bytes: 1 << 30 };
        assert_eq!(of("quiet memmap=1G!4G root=/dev/vda"), [one]);
        assert_eq!(of("memmap=1024M!0x100000000"), [one]);
        assert_eq!(of("memmap=64K$0x1000,1g!4g memmap=exactmap"), [one]);
        assert_eq!(of("memmap=1G!4G memmap=2G!8G").len(), 2);
        assert_eq!(of("memmap=1G@4G memmap=1G#4G memmap=!4G memmap=0!4G xmemmap=1G!4G"), []);
        assert_eq!(of("memmap=-1G!4G memmap=1G!4Q memmap=99999999999T!4G memmap=1G!"), []);
    }

    #[test]
    fn quotes_keep_a_word_whole() {
        let line = CommandLine::new("a=\"b  c\"   d kho=off kho=on");
        assert_eq!(line.text(), "a=\"b  c\" d kho=off kho=on");
        assert_eq!(line.value("kho"), Some("on"), "the last one holds");
        assert_eq!(line.value("a"), Some("\"b  c\""));
        assert_eq!(CommandLine::new("x=\"memmap=1G!4G no\"").reservations(), []);
        assert_eq!(of("memmap=\"1G!4G\"").len() + of("\"memmap=1G!4G\"").len(), 2);
        assert_eq!(line.value("b"), None);
    }

    #[test]
    fn one_covers_another_that_lies_in_it() {
        let one = Reservation { start: 4 << 30, bytes: 1 << 30 };
        assert!(one.covers(&one));
        assert!(one.covers(&Reservation { start: one.start + 4096, bytes: 4096 }));
        assert!(!one.covers(&Reservation { start: one.start - 1, ..one }));
        assert!(!one.covers(&Reservation { bytes: one.bytes + 1, ..one }));
        assert!(!one.covers(&Reservation { start: u64::MAX, bytes: 2 }));
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_again(start in any::<u64>(), bytes in 1u64..) {
            let reservation = Reservation { start, bytes };
            prop_assert_eq!(of(&reservation.to_string()), vec![reservation]);
        }

        #[test]
        fn no_line_ends_the_reader(line in ".{0,200}") {
            let _ = (of(&line), CommandLine::new(&line).value("memmap"));
        }
    }
}
