//! A guest's threads under a reservation that follows what its jobs need.
//!
//! There is one controller process for each guest: the command, or a copy of it in the background
//! ([`background`]). A second process, the [`watchdog`], waits for its end and gives the threads back
//! if it was killed. If both were, the next command that looks at guests does (`Ledger::recover`).

pub mod background;
mod priority;
pub mod watchdog;

use crate::container_process::require_machine;
use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::process::{connect, qmp_failure};
use background::Background;
use dewar_guest_qemu::cmdline::PORT_FILE;
use dewar_kernel::{Task, end_signals};
use dewar_qos::{
    Controller, Ended, Entry, LawKind, Ledger, Mechanism, Port, Promise, QosError, Subject, Target,
};
use dewar_registry::{ProcessId, RegistryError};
use priority::go_ahead;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::DirBuilder;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use watchdog::Watchdog;

/// How long a guest may be between two QEMUs, or with another command.
pub const BETWEEN: Duration = Duration::from_secs(5);

/// What a controller is to hold, and for which threads.
#[derive(Debug, Clone)]
pub struct QosOptions {
    /// Jobs a second.
    pub rate: f64,
    /// The share of jobs that may miss their deadlines.
    pub miss: f64,
    /// The least of a CPU for each thread.
    pub min: f64,
    /// The most.
    pub max: f64,
    /// A process whose threads are meant, not a guest's, and how many of them.
    pub process: Option<(i32, usize)>,
    /// The socket for heartbeats, where it is not the usual one.
    pub port: Option<PathBuf>,
    /// How the reservation is found.
    pub law: LawKind,
    /// How CPU time is given.
    pub mechanism: Mechanism,
    /// Whether it is given by weight where there are no deadlines.
    pub or_by_weight: bool,
    /// Whether it is admitted even where not all can have their most at once.
    pub overcommit: bool,
}

/// Holds a guest's deadlines until a signal or the guest's end; `each_second` is told how it fares.
/// Returns what was seen in all; nothing where the guest was gone before. The signals are those of this
/// thread: a thread that is started before would be ended by them.
///
/// # Errors
/// Where there is no such guest, it has no port for heartbeats, or no CPU can be promised.
pub fn serve(
    host: &Host,
    name: &str,
    options: &QosOptions,
    warn: &dyn Fn(&str),
    each_second: &mut dyn FnMut(&Entry),
) -> Result<Option<Entry>, Failure> {
    let mut subject = find(host, name, options)?;
    let mut watchdog = Watchdog::start(host, name)?;
    go_ahead();
    let stop = end_signals().map_err(QosError::from)?;
    let ledger = host.qos_ledger();
    let mut seen = None;
    let folder = host.qos_folder();
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| QosError::File(folder.clone(), error))?;
    let mut background = Background::of_this_process(folder.join(format!("{name}.log")));
    loop {
        let mut controller = begin(host, &ledger, &subject, options, warn)?;
        watchdog.hold(controller.entry());
        background.say_ready();
        let ended = controller.run(stop.as_fd(), |entry| {
            each_second(entry);
            watchdog.hold(entry);
            watchdog.beat();
        })?;
        let entry = controller.entry().clone();
        add(&mut seen, entry.clone());
        if ended == Ended::Stopped {
            background.remove_log();
            break;
        }
        // It may go on in another QEMU; its place is not given away meanwhile. Should
        // we fail, the watchdog gives it up.
        controller.keep_place();
        match successor(host, &subject, options, stop.as_fd())? {
            Some(next) => subject = next,
            None => {
                // While no other controller can have that name.
                background.remove_log();
                ledger.release(&entry);
                break;
            }
        }
    }
    watchdog.dismiss();
    Ok(seen)
}

fn begin(
    host: &Host,
    ledger: &Ledger,
    subject: &Subject,
    options: &QosOptions,
    warn: &dyn Fn(&str),
) -> Result<Controller, Failure> {
    let threads = options.process.map_or(subject.vcpus.len(), |(_, threads)| threads);
    let QosOptions { rate, miss, min, max, .. } = *options;
    let promise = Promise { rate, miss, min, max, threads };
    let target = Target {
        promise,
        law: options.law,
        means: options.mechanism,
        overcommit: options.overcommit,
    };
    let start = |target: Target| {
        let port = port(host, subject, options);
        Controller::start(ledger.clone(), subject.clone(), target, port)
    };
    let result = match start(target.clone()) {
        Err(QosError::NoDeadlines(why)) if options.or_by_weight => {
            warn(&format!("{why}; giving CPU time by weight instead"));
            start(Target { means: Mechanism::Weight, ..target })
        }
        result => result,
    };
    Ok(result?)
}

fn port(host: &Host, subject: &Subject, options: &QosOptions) -> Port {
    let own = |default: PathBuf| options.port.clone().unwrap_or(default);
    if options.process.is_none() {
        let folder = host.registry.guest(&subject.name);
        let file = folder.map(|folder| folder.file(PORT_FILE)).unwrap_or_default();
        return Port::Connect(own(file));
    }
    let path = own(host.qos_folder().join(format!("{}.sock", subject.name)));
    let user = std::fs::metadata(format!("/proc/{}", subject.process.pid)).map_or(0, |it| it.uid());
    Port::Listen { path, user }
}

/// The guest by that name, or the process.
fn find(host: &Host, name: &str, options: &QosOptions) -> Result<Subject, Failure> {
    if let Some((pid, _)) = options.process {
        if pid == 1 {
            return Err(Failure::new(Code::Usage, "process 1 is the whole system's")
                .state("nothing was changed"));
        }
        // A name is a file's: the rule for guests' names holds.
        host.registry.guest(name)?;
        let process = ProcessId::of(pid)
            .ok_or_else(|| Failure::new(Code::NotFound, format!("there is no process {pid}")))?;
        return Ok(Subject { name: name.to_owned(), process, vcpus: Vec::new() });
    }
    // A checkpoint of it, say: it has its deadlines meanwhile.
    let guest = host.lock_within(name, BETWEEN)?;
    require_machine(&guest.record)?;
    guest.require_alive()?;
    if options.port.is_none() && !guest.folder.file(PORT_FILE).exists() {
        let what = format!("guest '{name}' has no port for heartbeats");
        return Err(Failure::new(Code::Unsupported, what)
            .advice("start it with 'dewar run --qos', or name a socket with --port"));
    }
    let mut qmp = connect(&guest.record)?;
    let threads = qmp.vcpu_threads().map_err(|error| qmp_failure(&guest.record, &error))?;
    let process = guest.record.process;
    let vcpus = threads.into_iter().map(|thread| Task { process: process.pid, thread }).collect();
    Ok(Subject { name: name.to_owned(), process, vcpus })
}

/// The guest in its next QEMU, where it was upgraded.
fn successor(
    host: &Host,
    before: &Subject,
    options: &QosOptions,
    stop: BorrowedFd<'_>,
) -> Result<Option<Subject>, Failure> {
    let mut began = Instant::now();
    while options.process.is_none() && began.elapsed() < BETWEEN {
        let folder = host.registry.guest(&before.name)?;
        let record = folder.record();
        let gone = matches!(record, Err(RegistryError::NoSuchGuest(_)));
        if gone {
            return Ok(None);
        }
        if record.is_ok_and(|record| record.process != before.process && record.process.is_alive())
        {
            match find(host, &before.name, options) {
                Ok(subject) => return Ok(Some(subject)),
                // The command that moves it is still at work, or took it for a checkpoint: that may
                // take minutes.
                Err(_) if matches!(folder.try_lock(), Err(RegistryError::Locked(_))) => {
                    began = Instant::now();
                }
                Err(_) if began.elapsed() < BETWEEN => {}
                Err(failure) => return Err(failure),
            }
        }
        let mut asked = [PollFd::from_borrowed_fd(stop, PollFlags::IN)];
        let moment = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        if poll(&mut asked, Some(&moment)).is_ok_and(|count| count > 0) {
            return Ok(None);
        }
    }
    Ok(None)
}

fn add(all: &mut Option<Entry>, entry: Entry) {
    let before = all.take();
    let mut sum = entry;
    if let Some(before) = before {
        sum.seen.jobs += before.seen.jobs;
        sum.seen.missed += before.seen.missed;
        sum.seen.rescued += before.seen.rescued;
        sum.seen.refused += before.seen.refused;
        sum.seen.ignored += before.seen.ignored;
    }
    *all = Some(sum);
}
