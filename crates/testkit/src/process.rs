use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::gettid;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The letter of a process's or a thread's state (proc_pid_stat(5)).
pub fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Whether a process runs (a zombie does not).
pub fn is_alive(pid: i32) -> bool {
    // A first thread that is dead says nothing while others are dying.
    let threads = || std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    state(pid).is_some_and(|state| !"ZX".contains(state) || threads() > 1)
}

/// Whether a process is stopped by a signal.
pub fn signal_stop(pid: i32) -> bool {
    state(pid) == Some('T')
}

/// Sends a signal; a process that is gone is as good.
pub fn kill(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

/// A time to wait, longer than what a host usually needs, and longer still where `DEWAR_TEST_SLOW` says that it is
/// slow: only a test that fails waits for its end.
pub fn patience(usual: Duration) -> Duration {
    if std::env::var_os("DEWAR_TEST_SLOW").is_some() { usual * 6 } else { usual * 3 }
}

/// Waits until something holds.
///
/// # Panics
/// Where it does not within the time.
pub fn wait_until(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    let within = patience(within);
    let deadline = Instant::now() + within;
    loop {
        let began = Instant::now();
        if holds() {
            return;
        }
        // This process may have stood still since the look before: one that began late enough counts.
        assert!(began < deadline, "{what}: not within {within:?}");
        // A look that costs something is not taken all the time.
        let pause = (3 * began.elapsed()).min(Duration::from_millis(100));
        std::thread::sleep(pause.max(Duration::from_millis(3)));
    }
}

/// Whether connections to a Unix socket are taken: its file is there a little before.
#[must_use]
pub fn listens(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}

/// Waits until a process has ended.
///
/// # Panics
/// Where it has not within 20 s.
pub fn wait_while_alive(pid: i32) {
    wait_until(&format!("the end of process {pid}"), Duration::from_secs(20), || !is_alive(pid));
}

/// Starts a thread that goes before all others (`SCHED_FIFO`) where it may.
pub fn spawn_first<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let _ = sender.send(gettid());
        work()
    });
    let _ = receiver.recv().map(put_before_others);
    thread
}

/// Lets a thread of this process go before all others (`SCHED_FIFO`); false
/// where that is not allowed.
pub fn put_before_others(thread: Pid) -> bool {
    let id = thread.as_raw_nonzero().to_string();
    let mut chrt = Command::new("chrt");
    chrt.args(["--fifo", "--pid", "50", &id]).stdout(Stdio::null()).stderr(Stdio::null());
    chrt.status().is_ok_and(|status| status.success())
}
