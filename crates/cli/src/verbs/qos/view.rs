//! A line on the terminal that tells how a guest fares.
//!
//! It is drawn by a thread of its own: a terminal that takes nothing (Ctrl-S) must not
//! keep a controller waiting. That thread is an ordinary one, so the controller puts a
//! line down only where it need not wait for it.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

const EVERY: Duration = Duration::from_millis(250);

/// The line, until this is dropped.
pub struct View {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    line: Mutex<Option<String>>,
    ends: AtomicBool,
}

impl View {
    pub fn start() -> Self {
        let shared = Arc::<Shared>::default();
        let its = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(2));
            // As much of the line as the terminal has room for.
            let style = ProgressStyle::with_template("{wide_msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            while !its.ends.load(Ordering::Relaxed) {
                let line = its.line.lock().ok().and_then(|mut line| line.take());
                line.into_iter().for_each(|line| bar.set_message(line));
                std::thread::park_timeout(EVERY);
            }
            bar.finish_and_clear();
        });
        Self { shared, thread: Some(thread) }
    }

    /// Has a line drawn soon.
    pub fn show(&self, line: String) {
        if let Ok(mut next) = self.shared.line.try_lock() {
            *next = Some(line);
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
