//! How a program that has a deadline for each of its jobs tells the host how it
//! fares, so that `dewar qos` can give its machine the CPU that it needs.
//!
//! It writes lines of text to a port: in a VM the virtio-serial port
//! `org.dewar.qos.0`, elsewhere a unix socket. Nothing comes back, and the port need
//! not be open: a line that cannot be written at once is lost, never waited for.
//!
//! ```text
//! dewar 1              which protocol; the first line
//! rate 30              how many jobs there are in a second
//! job 17 met 12034     job 17 was done 12,034 µs before its deadline
//! job 18 missed 2100   job 18 was done 2,100 µs after it
//! job 19 missed        job 19 was not done at all
//! ```
//!
//! A line has at most [`MAX_LINE`] bytes with its newline. A reader passes over
//! lines that it does not know. `docs/heartbeat.md` is the same for people.
//!
//! ```no_run
//! let mut pace = dewar_beat::Pace::new(dewar_beat::Beat::open(), 30.0);
//! loop {
//!     pace.wait();
//!     // The job.
//!     pace.done();
//! }
//! ```
#![forbid(unsafe_code)]

mod pace;
mod port;

pub use pace::Pace;
pub use port::{Beat, PORT_NAME};

use std::fmt;
use std::time::Duration;

/// The longest line, in bytes, with its newline.
pub const MAX_LINE: usize = 64;
/// The protocol's version.
pub const VERSION: u32 = 1;

/// One line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Line {
    /// Which protocol this is.
    Hello {
        /// Its version.
        version: u32,
    },
    /// How many jobs there are in a second.
    Rate(f64),
    /// A job is over.
    Job {
        /// Its number; they ascend.
        number: u64,
        /// How it ended.
        end: End,
    },
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By its deadline, so long before it.
    Met(Duration),
    /// So long after it; `None`: never.
    Missed(Option<Duration>),
}

impl Line {
    /// Reads a line, without its newline. `None` for whatever is not exactly one.
    pub fn parse(line: &[u8]) -> Option<Self> {
        if line.len() >= MAX_LINE {
            return None;
        }
        let text = std::str::from_utf8(line).ok()?;
        let mut words = text.split(' ');
        let parsed = match words.next()? {
            "dewar" => Self::Hello { version: number(words.next()?)? },
            "rate" => {
                let rate: f64 = words.next()?.parse().ok()?;
                (rate.is_finite() && rate > 0.0).then_some(Self::Rate(rate))?
            }
            "job" => {
                let job = number(words.next()?)?;
                let end = match (words.next()?, words.next()) {
                    ("met", Some(before)) => End::Met(Duration::from_micros(number(before)?)),
                    ("missed", None) => End::Missed(None),
                    ("missed", Some(after)) => {
                        End::Missed(Some(Duration::from_micros(number(after)?)))
                    }
                    _ => return None,
                };
                Self::Job { number: job, end }
            }
            _ => return None,
        };
        words.next().is_none().then_some(parsed)
    }
}

/// Digits alone: no sign, no blanks.
fn number<T: std::str::FromStr>(word: &str) -> Option<T> {
    word.bytes().all(|byte| byte.is_ascii_digit()).then(|| word.parse().ok())?
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hello { version } => write!(f, "dewar {version}"),
            Self::Rate(rate) => write!(f, "rate {rate}"),
            Self::Job { number, end: End::Met(before) } => {
                write!(f, "job {number} met {}", before.as_micros())
            }
            Self::Job { number, end: End::Missed(Some(after)) } => {
                write!(f, "job {number} missed {}", after.as_micros())
            }
            Self::Job { number, end: End::Missed(None) } => write!(f, "job {number} missed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_is_documented_and_nothing_else() {
        let met = End::Met(Duration::from_micros(12034));
        let job = Line::Job { number: 17, end: met };
        assert_eq!(Line::parse(b"job 17 met 12034"), Some(job));
        assert_eq!(Line::parse(b"dewar 1"), Some(Line::Hello { version: 1 }));
        for bad in [
            "",
            "job",
            "job 1",
            "job 1 met",
            "job -1 met 2",
            "job 1 met +2",
            "job 1 met 2 3",
            "job 1 missed ",
            "job 1 skipped",
            "rate 0",
            "rate nan",
            "rate inf",
            "rate -3",
            " job 1 met 2",
            "job 99999999999999999999 met 1",
            "JOB 1 met 2",
            "job 1 met 2\r",
        ] {
            assert_eq!(Line::parse(bad.as_bytes()), None, "{bad:?}");
        }
        assert_eq!(Line::parse(&[b'1'; MAX_LINE]), None);
        assert_eq!(Line::parse(b"job 1 met \xff"), None);
    }
}
