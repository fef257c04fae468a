use crate::{Beat, End, Line};
use std::time::{Duration, Instant};

/// How far behind a schedule may be before it begins anew.
const HOPELESS: Duration = Duration::from_secs(1);

/// The part of a period by which a job whose release nobody knows may be late: two
/// clocks never agree.
const UNSTEADY: u32 = 50;

/// The schedule of a periodic program: job *n* is released at *n* periods from the
/// start, and its deadline is the release of the next.
#[derive(Debug)]
pub struct Pace {
    beat: Beat,
    period: Duration,
    /// When the next job, or the one under way, is released.
    release: Instant,
    number: u64,
    missed: u64,
}

impl Pace {
    /// Begins now, with `rate` jobs a second.
    ///
    /// # Panics
    /// Where the rate is not above zero.
    pub fn new(mut beat: Beat, rate: f64) -> Self {
        assert!(rate > 0.0, "a rate of {rate}");
        beat.rate(rate);
        let period = Duration::from_secs_f64(1.0 / rate);
        Self { beat, period, release: Instant::now(), number: 0, missed: 0 }
    }

    /// Waits until the next job may begin.
    pub fn wait(&self) {
        std::thread::sleep(self.release.saturating_duration_since(Instant::now()));
    }

    /// Says that the job that [`Pace::wait`] waited for is done; tells how.
    pub fn done(&mut self) -> End {
        let (now, deadline) = (Instant::now(), self.release + self.period);
        let end = match deadline.checked_duration_since(now) {
            Some(before) => End::Met(before),
            None => End::Missed(Some(now - deadline)),
        };
        self.report(end);
        if now > self.release + HOPELESS {
            self.release = now;
        }
        end
    }

    /// Says that the job was given up.
    pub fn gave_up(&mut self) {
        self.report(End::Missed(None));
    }

    /// Says that a job is done whose release nobody knows: it had a period from
    /// when the one before was due, or was done if that was later: a program that stood
    /// still, or whose clock goes slower than ours, does not make up for it. One that is
    /// early by more than a period moves the schedule, so that nobody saves up time.
    pub fn seen(&mut self) -> End {
        let now = Instant::now();
        if self.number == 0 || self.release > now + self.period {
            self.release = now;
        }
        let late = now.saturating_duration_since(self.release + self.period);
        if late.is_zero() {
            return self.done();
        }
        let is_missed = late > self.period / UNSTEADY;
        let end = if is_missed { End::Missed(Some(late)) } else { End::Met(Duration::ZERO) };
        self.report(end);
        self.release = now;
        end
    }

    /// How many jobs there were, and how many missed their deadlines.
    pub fn counts(&self) -> (u64, u64) {
        (self.number, self.missed)
    }

    fn report(&mut self, end: End) {
        self.beat.say(&Line::Job { number: self.number, end });
        self.number += 1;
        self.missed += u64::from(matches!(end, End::Missed(_)));
        self.release += self.period;
    }
}
