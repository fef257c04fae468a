//! The processes beside a controller: the watchdog, which gives the guest's threads
//! back if the controller was killed, and the controller itself where it goes on in
//! the background.

use crate::args::WatchdogArgs;
use crate::context::Context;
use crate::failure::{Code, Failure};
use crate::output::tell;
use dewar_kernel::detach;
use dewar_qos::{Entry, Ledger, end_rescues};
use dewar_registry::ProcessId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const ALL_WELL: u8 = b'w';
const ALIVE: u8 = b'a';
/// What comes next is how the threads were: a length, and the entry as JSON.
const ENTRY: u8 = b'e';
/// A controller that has said nothing for so long does nothing.
const SILENT_FOR: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };
const READY: &str = "ready";
/// Says to a controller that somebody waits for it to be ready.
const WAITED_FOR: &str = "DEWAR_QOS_READY";
/// How often, and how far apart, the watchdog looks whether the controller is gone.
const TRIES: u32 = 200;
const APART: Duration = Duration::from_millis(10);

/// A process that waits for our end.
pub struct Watchdog {
    process: Child,
    /// How many threads it was told of, for which process.
    told: Option<(usize, ProcessId)>,
}

impl Watchdog {
    pub fn start(context: &Context, name: &str) -> Result<Self, Failure> {
        let start = || {
            let mut command = Command::new(std::env::current_exe()?);
            command
                .arg("--root")
                .arg(context.registry.root())
                .args(["__qos-watchdog", name])
                .env_remove(WAITED_FOR)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            detach(&mut command).spawn()
        };
        let process = start().map_err(|error: std::io::Error| {
            Failure::new(Code::Failed, format!("the watchdog process did not start: {error}"))
        })?;
        Ok(Self { process, told: None })
    }

    /// Tells it how the threads were that we hold, where it does not know: should we be
    /// killed, it needs nobody else to give them back.
    pub fn hold(&mut self, entry: &Entry) {
        let now = (entry.saved.len(), entry.process);
        if self.told == Some(now) {
            return;
        }
        let Ok(text) = serde_json::to_vec(entry) else { return };
        let length = (text.len() as u32).to_le_bytes();
        let word = [&[ENTRY][..], &length, &text].concat();
        let said = self.process.stdin.as_mut().map(|stdin| stdin.write_all(&word));
        if matches!(said, Some(Ok(()))) {
            self.told = Some(now);
        }
    }

    /// Says that we are at work; to be said each second.
    pub fn beat(&mut self) {
        let _ = self.process.stdin.as_mut().map(|stdin| stdin.write_all(&[ALIVE]));
    }

    /// Says that the guest is as it was.
    pub fn dismiss(mut self) {
        // A watchdog that was killed needs no word.
        let _ = self.process.stdin.take().map(|mut stdin| stdin.write_all(&[ALL_WELL]));
        let _ = self.process.wait();
    }
}

/// The watchdog's own life.
pub fn keep(context: &Context, args: WatchdogArgs) -> Result<(), Failure> {
    super::go_ahead();
    let ledger = context.qos_ledger();
    let mut held: Option<Entry> = None;
    loop {
        let mut word = [0];
        if !is_heard(SILENT_FOR) {
            // Stopped, it would hold what it rescued without end.
            let entry = ledger.entry(&args.name).or_else(|| held.clone());
            entry.iter().for_each(end_rescues);
            continue;
        }
        let said = std::io::stdin().read(&mut word).is_ok_and(|count| count == 1);
        match word[0] {
            ALL_WELL if said => return Ok(()),
            ALIVE if said => {}
            ENTRY if said => held = read_entry().or(held),
            _ => break,
        }
    }
    // Its files are closed a moment before it is gone.
    let is_alive = || held.as_ref().is_some_and(|entry| entry.controller.is_alive());
    for _ in 0..TRIES {
        ledger.settle();
        if ledger.entry(&args.name).is_none() && !is_alive() {
            break;
        }
        std::thread::sleep(APART);
    }
    // Its entry may be lost or unreadable: what we were told is as good.
    if let Some(entry) = held.filter(|entry| !entry.controller.is_alive()) {
        ledger.release_entry(&entry);
    }
    Ok(())
}

fn read_entry() -> Option<Entry> {
    let mut stdin = std::io::stdin();
    let mut length = [0; 4];
    stdin.read_exact(&mut length).ok()?;
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    stdin.read_exact(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Waits until the controller says something, or ends.
fn is_heard(within: Timespec) -> bool {
    let stdin = std::io::stdin();
    let mut asked = [PollFd::new(&stdin, PollFlags::IN)];
    poll(&mut asked, Some(&within)).is_ok_and(|count| count > 0)
}

/// Starts this very command again, in the background, and waits until it serves.
pub fn detached(context: &Context, name: &str, rate: f64, ledger: &Ledger) -> Result<(), Failure> {
    let failed = |error: std::io::Error| {
        Failure::new(Code::Failed, format!("the controller did not start: {error}"))
    };
    let words = std::env::args_os().skip(1).filter(|word| word != "--detach");
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command
        .args(words)
        .env(WAITED_FOR, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = detach(&mut command).spawn().map_err(failed)?;
    let mut first = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut first).map_err(failed)?;
    }
    // It ends when the controller has said that it is ready.
    let mut said = String::new();
    let _ = child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut said));
    if first.trim() != READY {
        let code = match child.wait().map_err(failed)?.code() {
            Some(3) => Code::NotFound,
            Some(4) => Code::Unsupported,
            Some(5) => Code::Attention,
            _ => Code::Failed,
        };
        let what = said.trim().trim_start_matches("dewar: ").to_owned();
        let failure = Failure::new(code, what);
        if context.json && !first.is_empty() {
            tell(first.trim_end());
            return Err(failure.already_printed());
        }
        return Err(failure);
    }
    eprint!("{said}");
    let pid = child.id();
    context.print(
        json!({"name": name, "controller": pid, "target_per_s": rate}),
        &format!(
            "process {pid} gives {name} the CPU for {rate} jobs a second; 'dewar qos --status' \
             tells how it fares, 'dewar qos {name} --release' ends it"
        ),
    );
    debug_assert!(ledger.entry(name).is_some());
    Ok(())
}

/// Says, where somebody waits for it, that the guest is served; nobody hears from us
/// after that.
pub fn say_ready(log: &Path) {
    if std::env::var_os(WAITED_FOR).is_none() {
        return;
    }
    let _ = writeln!(std::io::stdout(), "{READY}");
    let to_log = File::options().create(true).write(true).truncate(true).mode(0o600).open(log);
    let file = to_log.or_else(|_| File::options().write(true).open("/dev/null"));
    if let Ok(file) = file {
        let _ = rustix::stdio::dup2_stdout(file.as_fd());
        let _ = rustix::stdio::dup2_stderr(file.as_fd());
    }
}

/// Removes the log of a controller in the background that has nothing more to say.
pub fn forget_log(log: &Path) {
    if std::env::var_os(WAITED_FOR).is_some() {
        let _ = std::fs::remove_file(log);
    }
}

/// Asks a controller to end; one that has ended needs no asking.
pub fn ask_to_end(controller: ProcessId) {
    if let Some(pid) = Pid::from_raw(controller.pid).filter(|_| controller.is_seen()) {
        let _ = kill_process(pid, Signal::TERM);
        // One that somebody stopped hears of it only then.
        let _ = kill_process(pid, Signal::CONT);
    }
}
