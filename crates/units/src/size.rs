use crate::ParseUnitError;
use std::{fmt, str::FromStr};

const UNITS: [(&str, u64); 5] =
    [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10), ("", 1)];

/// A size in bytes that reads and prints as people write it: `2G`, `512M`,
/// `64K`; always powers of 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = ParseUnitError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error =
            || ParseUnitError { text: text.to_owned(), expected: "a size such as 512M or 2G" };
        let upper = text.trim().to_ascii_uppercase();
        let plain = upper.trim_end_matches('B').trim_end_matches('I');
        let digits = plain.trim_end_matches(['K', 'M', 'G', 'T']);
        let suffix = &plain[digits.len()..];
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == suffix).ok_or_else(error)?;
        let number: f64 = digits.trim().parse().map_err(|_| error())?;
        let bytes = number * *factor as f64;
        if digits.trim().is_empty() || !(0.0..1.8e19).contains(&bytes) {
            return Err(error());
        }
        Ok(Self(bytes as u64))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, factor) =
            UNITS.iter().find(|(_, factor)| self.0 >= *factor).unwrap_or(&UNITS[4]);
        let value = self.0 as f64 / *factor as f64;
        let text = match name {
            &"" => format!("{} B", self.0),
            name if value < 10.0 && value.fract() != 0.0 => format!("{value:.2} {name}iB"),
            name if value.fract() == 0.0 => format!("{value} {name}iB"),
            name => format!("{value:.1} {name}iB"),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("2G", 2 << 30),
            ("1.5g", 3 << 29),
            ("64KiB", 65536),
            ("512mb", 512 << 20),
            ("17", 17),
            ("9B", 9),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in ["", "G", "-1", "2X", "1e400", "two", "-5G", "nan"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn prints_plain_units() {
        for (bytes, text) in [
            (0, "0 B"),
            (1 << 30, "1 GiB"),
            (1300 << 20, "1.27 GiB"),
            (162 << 20, "162 MiB"),
            (4097, "4.00 KiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }
}
