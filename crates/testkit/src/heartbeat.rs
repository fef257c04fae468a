//! The guest's heartbeat, timed by a thread of this process: what a client of
//! the guest would notice. The guest's own clock stops with it.
//!
//! The thread goes before all others where it may (`SCHED_FIFO`): one that did
//! not waited for a CPU for 24 ms while the guest ran, and took it for a gap.

use crate::process::spawn_first;
use anyhow::Result;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Listens to a guest's second serial port, on which it prints a byte every
/// millisecond.
#[derive(Debug)]
pub struct Heartbeat {
    arrivals: Arc<Mutex<Vec<Instant>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What was heard in a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Beats {
    /// Beats.
    pub count: usize,
    /// The longest time without one.
    pub longest_gap: Duration,
    /// When it began.
    pub gap_from: Instant,
}

impl Heartbeat {
    /// Begins to listen.
    ///
    /// # Errors
    /// Where the port cannot be reached.
    pub fn listen(path: &Path) -> Result<Self> {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(Duration::from_millis(50)))?;
        let arrivals = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (heard, stopped) = (arrivals.clone(), stop.clone());
        let thread = spawn_first(move || {
            let mut buffer = [0; 256];
            while !stopped.load(Ordering::Relaxed) {
                match stream.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(_) => heard.lock().expect("lock").push(Instant::now()),
                    Err(_) => {}
                }
            }
        });
        Ok(Self { arrivals, stop, thread: Some(thread) })
    }

    /// Listens to a guest whose second serial port is a FIFO: it stays one while
    /// the guest changes from one QEMU to another.
    ///
    /// # Errors
    /// Where it cannot be opened.
    pub fn listen_fifo(path: &Path) -> Result<Self> {
        // For writing too: then it does not end with a QEMU.
        let mut fifo = File::options().read(true).write(true).open(path)?;
        let arrivals = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (heard, stopped) = (arrivals.clone(), stop.clone());
        let thread = spawn_first(move || {
            let mut buffer = [0; 256];
            let within = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            while !stopped.load(Ordering::Relaxed) {
                let came = poll(&mut [PollFd::new(&fifo, PollFlags::IN)], Some(&within));
                if came.is_ok_and(|count| count > 0) && fifo.read(&mut buffer).is_ok() {
                    heard.lock().expect("lock").push(Instant::now());
                }
            }
        });
        Ok(Self { arrivals, stop, thread: Some(thread) })
    }

    /// What was heard between two instants; their ends count as beats.
    ///
    /// # Panics
    /// Where the listening thread panicked.
    pub fn between(&self, from: Instant, to: Instant) -> Beats {
        let arrivals = self.arrivals.lock().expect("lock");
        let mut last = from;
        let mut beats = Beats { count: 0, longest_gap: Duration::ZERO, gap_from: from };
        let mut end = |beats: &mut Beats, at: Instant| {
            let gap = at.saturating_duration_since(last);
            if gap > beats.longest_gap {
                (beats.longest_gap, beats.gap_from) = (gap, last);
            }
            last = at;
        };
        for at in arrivals.iter().filter(|at| (from..=to).contains(*at)) {
            beats.count += 1;
            end(&mut beats, *at);
        }
        end(&mut beats, to);
        beats
    }

    /// The first beat after an instant, if one came.
    ///
    /// # Panics
    /// Where the listening thread panicked.
    pub fn first_after(&self, from: Instant) -> Option<Instant> {
        let arrivals = self.arrivals.lock().expect("lock");
        arrivals.iter().find(|at| **at >= from).copied()
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
