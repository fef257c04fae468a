//! The progress bar, and the test suite's way to be somewhere exactly.

use crate::output::warn;
use dewar_checkpoint::{CaptureStep, Observer, Step};
use dewar_lifecycle::{Flow, Reporter};
use dewar_units::{ByteSize, format_duration};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::process::{Signal, getpid, kill_process};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// `STEP:kill` or `STEP:stop`: the signal that this process sends itself when
/// it comes to that step; `STEP:hang`: that it does nothing more there. For tests of what
/// happens then.
const SIGNAL_AT: &str = "DEWAR_TEST_SIGNAL";

/// Shows how far a command is, on a terminal.
pub struct Progress {
    bar: ProgressBar,
    /// Without a signal it hangs.
    signal: Option<(String, Option<Signal>)>,
    /// No drawing while the guest stands still.
    quiet: AtomicBool,
}

impl Progress {
    pub fn new(first: &str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(100), ProgressDrawTarget::stderr_with_hz(10));
        let style = ProgressStyle::with_template(
            "{msg:<22} [{bar:32}] {percent:>3} %  {elapsed}  {prefix}",
        )
        .unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.progress_chars("=> "));
        bar.set_message(first.to_owned());
        Self { bar, signal: wanted_signal(), quiet: AtomicBool::new(false) }
    }

    /// Does something with the terminal that is not to be drawn over.
    pub fn aside<T>(&self, something: impl FnOnce() -> T) -> T {
        self.bar.suspend(something)
    }

    /// Shows nothing more.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }

    /// Sends this process the signal that a test wants here.
    fn signal_at(&self, name: &str) {
        if let Some((_, signal)) = self.signal.as_ref().filter(|(step, _)| step == name) {
            match signal {
                Some(signal) => drop(kill_process(getpid(), *signal)),
                None => std::thread::sleep(Duration::from_secs(3600)),
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Reporter for Progress {
    fn observer(&self) -> &dyn Observer {
        self
    }

    fn stage(&self, name: &str) {
        self.bar.set_message(name.to_owned());
        self.bar.set_prefix("");
        self.signal_at(name);
    }

    fn flow(&self, flow: &Flow) {
        let speed = |bytes: f64| ByteSize(bytes as u64);
        self.bar.set_prefix(format!(
            "{}/s of memory as {}/s on the link, {} s left",
            speed(flow.memory_bytes_per_second),
            speed(flow.link_bytes_per_second),
            flow.left.as_secs(),
        ));
    }

    fn predicted(&self, pause: Duration, pages: u64) {
        let pause = format_duration(pause);
        self.bar.set_prefix(format!(
            "{pages} pages written meanwhile; it would stand still for {pause}"
        ));
    }

    fn reached(&self, step: &str) {
        self.signal_at(step);
    }

    fn warn(&self, what: &str) {
        self.aside(|| warn(what));
    }
}

impl Observer for Progress {
    fn step(&self, step: Step) {
        self.signal_at(step.name());
        let next = match step {
            Step::Begun => "preparing",
            Step::Capture(CaptureStep::Prepared) => "arming write tracking",
            Step::Capture(CaptureStep::Armed) => "saving memory",
            Step::BulkDone => "capturing changes",
            Step::Capture(CaptureStep::Flushed) => {
                self.quiet.store(true, Ordering::Relaxed);
                return;
            }
            Step::Capture(CaptureStep::Resumed) => {
                self.quiet.store(false, Ordering::Relaxed);
                "writing pages, disks"
            }
            Step::WrittenBehind => "writing to disk",
            _ => return,
        };
        if !self.quiet.load(Ordering::Relaxed) {
            self.bar.set_message(next);
        }
    }

    fn progress(&self, done: u64, of: u64) {
        self.bar.set_length(of);
        self.bar.set_position(done);
    }
}

fn wanted_signal() -> Option<(String, Option<Signal>)> {
    let wanted = std::env::var(SIGNAL_AT).ok()?;
    let (step, signal) = wanted.split_once(':')?;
    let signal = match signal {
        "stop" => Some(Signal::STOP),
        "hang" => None,
        _ => Some(Signal::KILL),
    };
    Some((step.to_owned(), signal))
}
