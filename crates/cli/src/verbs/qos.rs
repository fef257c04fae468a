//! `qos`: a guest's threads under a reservation that follows what its jobs need.
//!
//! One process for each guest: this one. A second, the watchdog, waits for its end
//! and gives the threads back if it was killed. If both were, the next command
//! that looks at guests does (`Ledger::settle`).

mod status;
mod view;
mod watchdog;

use crate::args::{ByChoice, LawChoice, QosArgs};
use crate::context::{Context, connect};
use crate::failure::{Code, Failure};
use crate::output::percent;
use dewar_guest_qemu::cmdline::PORT_FILE;
use dewar_kernel::{Scheduling, Task, end_signals};
use dewar_qos::{
    Controller, Ended, Entry, LawKind, Ledger, Mechanism, Port, Promise, QosError, Subject, Target,
};
use dewar_registry::{ProcessId, RegistryError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use std::fs::DirBuilder;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use view::View;
use watchdog::Watchdog;

pub use status::stray_line;
pub use watchdog::keep;

/// The real-time priority of the controller: it must run when a job ends, before a
/// thread that it rescues.
const PRIORITY: u32 = 2;
/// How long a guest may be between two QEMUs, or with another command.
const BETWEEN: Duration = Duration::from_secs(5);

pub fn run(context: &Context, args: QosArgs) -> Result<(), Failure> {
    refuse_nonsense(context, &args)?;
    let ledger = context.qos_ledger();
    ledger.settle();
    match (&args.name, args.target) {
        _ if args.status => status::run(context, &ledger, &args),
        (Some(name), _) if args.release => release(context, &ledger, name),
        (None, _) if args.release => release_unheld(context, &ledger, args.pid.unwrap_or(0)),
        (Some(name), Some(rate)) if args.detach => watchdog::detached(context, name, rate, &ledger),
        (Some(name), Some(rate)) => serve(context, &ledger, name, rate, &args),
        _ => Err(Failure::new(Code::Usage, "a name and a --target are needed")),
    }
}

/// What one option makes of another.
fn refuse_nonsense(context: &Context, args: &QosArgs) -> Result<(), Failure> {
    let nonsense = [
        (args.min > args.max || args.max == 0.0, "--min is above --max, or --max is zero"),
        (
            args.patience.is_some() && args.law != LawChoice::Stepwise,
            "--patience is for --law stepwise",
        ),
        (args.reclaim && args.by == ByChoice::Weight, "--reclaim is for deadlines"),
        (args.watch && !args.status, "--watch is for --status"),
        (args.watch && context.json, "--watch is for people: leave out --json"),
    ];
    match nonsense.iter().find(|(is_so, _)| *is_so) {
        Some((_, what)) => Err(Failure::new(Code::Usage, *what)),
        None => Ok(()),
    }
}

fn serve(
    context: &Context,
    ledger: &Ledger,
    name: &str,
    rate: f64,
    args: &QosArgs,
) -> Result<(), Failure> {
    let mut subject = find(context, name, args)?;
    let mut watchdog = Watchdog::start(context, name)?;
    go_ahead();
    let stop = end_signals().map_err(QosError::from)?;
    let view = View::start();
    let mut seen = None;
    let mut waits = true;
    let folder = context.qos_folder();
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| QosError::File(folder.clone(), error))?;
    let log = folder.join(format!("{name}.log"));
    loop {
        let mut controller = begin(context, ledger, &subject, rate, args)?;
        watchdog.hold(controller.entry());
        if std::mem::take(&mut waits) {
            watchdog::say_ready(&log);
        }
        let ended = controller.run(stop.as_fd(), |entry| {
            view.show(line(entry));
            watchdog.hold(entry);
            watchdog.beat();
        })?;
        let entry = controller.entry().clone();
        add(&mut seen, entry.clone());
        if ended == Ended::Stopped {
            watchdog::forget_log(&log);
            break;
        }
        // It may go on in another QEMU; nobody is given its place meanwhile. Should
        // we fail, the watchdog gives it up.
        controller.keep_place();
        match successor(context, &subject, args, stop.as_fd())? {
            Some(next) => subject = next,
            None => {
                // While nobody else can have that name.
                watchdog::forget_log(&log);
                ledger.release(&entry);
                break;
            }
        }
    }
    watchdog.dismiss();
    drop(view);
    if let Some(entry) = seen {
        let mut told = status::told(&entry);
        told["ended"] = json!(true);
        context.print(told, &format!("{name}: {}; its threads are as they were", sum(&entry)));
    }
    Ok(())
}

/// Lets this process run whenever it has something to do; where that may not be it is
/// slower.
fn go_ahead() {
    let own = std::process::id() as i32;
    let _ = Task { process: own, thread: own }.schedule(Scheduling::ahead(PRIORITY));
}

fn begin(
    context: &Context,
    ledger: &Ledger,
    subject: &Subject,
    rate: f64,
    args: &QosArgs,
) -> Result<Controller, Failure> {
    let threads = if args.pid.is_some() { args.threads.into() } else { subject.vcpus.len() };
    let QosArgs { miss, min, max, .. } = *args;
    let promise = Promise { rate, miss, min, max, threads };
    let means = match args.by {
        ByChoice::Weight => Mechanism::Weight,
        _ => Mechanism::Deadline { reclaim: args.reclaim },
    };
    let law = match (args.law, args.patience) {
        (LawChoice::Demand, _) => LawKind::Demand,
        (LawChoice::Stepwise, patience) => LawKind::Stepwise { patience },
    };
    let target = Target { promise, law, means, overcommit: args.overcommit };
    let start = |target: Target| {
        let port = port(context, subject, args);
        Controller::start(ledger.clone(), subject.clone(), target, port)
    };
    let result = match start(target.clone()) {
        Err(QosError::NoDeadlines(why)) if args.by == ByChoice::Auto => {
            // Nobody may be there to hear it.
            let _ = writeln!(std::io::stderr(), "dewar: {why}; giving CPU time by weight instead");
            start(Target { means: Mechanism::Weight, ..target })
        }
        result => result,
    };
    Ok(result?)
}

fn port(context: &Context, subject: &Subject, args: &QosArgs) -> Port {
    let own = |default: PathBuf| args.port.clone().unwrap_or(default);
    if args.pid.is_none() {
        let folder = context.registry.guest(&subject.name);
        let file = folder.map(|folder| folder.file(PORT_FILE)).unwrap_or_default();
        return Port::Connect(own(file));
    }
    let path = own(context.qos_folder().join(format!("{}.sock", subject.name)));
    let user = std::fs::metadata(format!("/proc/{}", subject.process.pid)).map_or(0, |it| it.uid());
    Port::Listen { path, user }
}

/// The guest by that name, or the process.
fn find(context: &Context, name: &str, args: &QosArgs) -> Result<Subject, Failure> {
    if let Some(pid) = args.pid {
        if pid == 1 {
            return Err(Failure::new(Code::Usage, "process 1 is the whole system's")
                .state("nothing was changed"));
        }
        // A name is a file's: the rule for guests' names holds.
        context.registry.guest(name)?;
        let process = ProcessId::of(pid)
            .ok_or_else(|| Failure::new(Code::NotFound, format!("there is no process {pid}")))?;
        return Ok(Subject { name: name.to_owned(), process, vcpus: Vec::new() });
    }
    // A checkpoint of it, say: it has its deadlines meanwhile.
    let held = context.hold_within(name, BETWEEN, |_, _| Ok(()))?;
    held.require_alive()?;
    if args.port.is_none() && !held.folder.file(PORT_FILE).exists() {
        let what = format!("guest '{name}' has no port for heartbeats");
        return Err(Failure::new(Code::Unsupported, what)
            .advice("start it with 'dewar run --qos', or name a socket with --port"));
    }
    let mut qmp = connect(&held.record)?;
    let told = qmp
        .execute("query-cpus-fast", json!({}))
        .map_err(|error| crate::context::qmp_failure(&held.record, &error))?;
    let process = held.record.process;
    let thread = |cpu: &serde_json::Value| cpu["thread-id"].as_i64();
    let threads = told.as_array().into_iter().flatten().filter_map(thread);
    let mut vcpus: Vec<Task> =
        threads.map(|thread| Task { process: process.pid, thread: thread as i32 }).collect();
    // TCG may run all vCPUs in one thread.
    vcpus.sort_unstable();
    vcpus.dedup();
    Ok(Subject { name: name.to_owned(), process, vcpus })
}

/// The guest in its next QEMU, where it was upgraded.
fn successor(
    context: &Context,
    before: &Subject,
    args: &QosArgs,
    stop: BorrowedFd<'_>,
) -> Result<Option<Subject>, Failure> {
    let mut began = Instant::now();
    while args.pid.is_none() && began.elapsed() < BETWEEN {
        let folder = context.registry.guest(&before.name)?;
        let record = folder.record();
        let gone = matches!(record, Err(RegistryError::NoSuchGuest(_)));
        if gone {
            return Ok(None);
        }
        if record.is_ok_and(|record| record.process != before.process && record.process.is_alive())
        {
            match find(context, &before.name, args) {
                Ok(subject) => return Ok(Some(subject)),
                // The command that moves it is still at work, or took it for a checkpoint: that may
                // take minutes.
                Err(_) if matches!(folder.lock(), Err(RegistryError::Locked(_))) => {
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

/// Ends the controller of a guest and waits until its threads are given back.
fn release(context: &Context, ledger: &Ledger, name: &str) -> Result<(), Failure> {
    let entry = ledger.entry(name).ok_or_else(|| {
        Failure::new(Code::NotFound, format!("'{name}' has no reservation"))
            .advice("'dewar qos --status' lists them")
    })?;
    watchdog::ask_to_end(entry.controller);
    if !entry.controller.ends_within(BETWEEN) {
        let what = format!("process {} does not end", entry.controller.pid);
        return Err(Failure::new(Code::Failed, what).state("the reservation holds"));
    }
    ledger.settle();
    context.print(
        json!({"name": name, "released": true}),
        &format!("{name}: {}; its threads are as they were", sum(&entry)),
    );
    Ok(())
}

/// Makes threads ordinary ones that are under a reservation which no controller holds.
fn release_unheld(context: &Context, ledger: &Ledger, pid: i32) -> Result<(), Failure> {
    let mut tasks = ledger.unheld();
    tasks.retain(|task| task.process == pid);
    if tasks.is_empty() {
        let holder = ledger.entries().into_iter().find(|entry| entry.process.pid == pid);
        let what = format!("process {pid} has no thread under a reservation that nobody holds");
        let failure = Failure::new(Code::NotFound, what);
        return Err(match holder {
            Some(entry) => failure.advice(format!("'dewar qos {} --release' ends it", entry.name)),
            None => failure.advice("'dewar qos --status' lists them"),
        });
    }
    for task in &tasks {
        task.schedule(Scheduling::ordinary(0)).map_err(QosError::from)?;
    }
    let threads: Vec<i32> = tasks.iter().map(|task| task.thread).collect();
    context.print(
        json!({"pid": pid, "released": true, "threads": threads}),
        &format!("{} threads of process {pid} are ordinary ones now", threads.len()),
    );
    Ok(())
}

fn sum(entry: &Entry) -> String {
    let seen = &entry.seen;
    let missed = seen.missed as f64 / seen.jobs.max(1) as f64;
    format!("{} jobs, {} missed ({})", seen.jobs, seen.missed, percent(missed))
}

fn line(entry: &Entry) -> String {
    let seen = &entry.seen;
    format!(
        "{}  reserved {}  used {}  last second {} of {} missed  in all {}",
        entry.name,
        percent(seen.reserved),
        percent(seen.used),
        seen.recent.1,
        seen.recent.0,
        sum(entry)
    )
}

impl From<QosError> for Failure {
    fn from(error: QosError) -> Self {
        let text = error.to_string();
        let unchanged = "its threads are scheduled as before";
        match error {
            QosError::Full { wanted, limit, others } => {
                let free = limit - others.iter().map(|(_, share)| share).sum::<f64>();
                // Rounded down: it is to be admitted with that.
                let fits = (free.max(0.0) / wanted * 100.0 + 0.001).floor();
                let advice = match fits >= 1.0 {
                    true => format!("with {fits} % of its --max it would be admitted; "),
                    false => String::new(),
                };
                Self::new(Code::Failed, text)
                    .state(unchanged)
                    .advice(format!("{advice}--overcommit admits it as it is"))
            }
            QosError::Held(_) => Self::new(Code::Failed, text)
                .state("it goes on")
                .advice("'dewar qos NAME --release' ends it"),
            QosError::Reserved(task) => {
                Self::new(Code::Failed, text).state(unchanged).advice(format!(
                    "if nobody else gave it that, 'dewar qos --release --pid {}' takes it away",
                    task.process
                ))
            }
            QosError::Unreadable(_) => Self::new(Code::Failed, text)
                .state(unchanged)
                .advice("remove it when the guest that has its name has ended"),
            QosError::NoDeadlines(_) | QosError::NoGroups(_) => {
                Self::new(Code::Unsupported, text).state(unchanged)
            }
            QosError::Kernel(_) | QosError::File(..) | QosError::Busy(_) => {
                Self::new(Code::Failed, text).state(unchanged)
            }
        }
    }
}
