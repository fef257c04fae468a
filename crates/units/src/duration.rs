use crate::ParseUnitError;
use std::time::Duration;

/// The longest that anybody waits: what is added to a time must not overflow.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Reads `20ms`, `1.5s`, `2m` or `300us`.
///
/// # Errors
/// Where the text is not a number with one of these units, or it is more than a year.
pub fn parse_duration(text: &str) -> Result<Duration, ParseUnitError> {
    let error =
        || ParseUnitError { text: text.to_owned(), expected: "a duration such as 20ms or 3s" };
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let seconds = match &text[digits.len()..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(error()),
    };
    let number: f64 = digits.trim().parse().map_err(|_| error())?;
    let duration = Duration::try_from_secs_f64(number * seconds).map_err(|_| error())?;
    if duration > LONGEST { Err(error()) } else { Ok(duration) }
}

/// Writes a duration with the unit that a person would choose.
pub fn format_duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 0.1 => format!("{:.1} ms", s * 1e3),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.2} s"),
        s => format!("{:.0} min {:.0} s", (s / 60.0).floor(), s % 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_durations() {
        assert_eq!(parse_duration("20ms"), Ok(Duration::from_millis(20)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        for text in ["", "5", "ms", "-3s", "3 parsecs", "infs", "1e19s"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert_eq!(format_duration(Duration::from_micros(16_400)), "16.4 ms");
        assert_eq!(format_duration(Duration::from_secs(61)), "61.00 s");
    }
}
