//! `upgrade`: another QEMU under a guest that runs.

mod all;

use crate::args::UpgradeArgs;
use crate::context::{Context, Held, wait_for_memory};
use crate::failure::{Code, Failure};
use crate::guardian::Guardian;
use crate::output::milliseconds;
use crate::progress::Progress;
use crate::tracking::Tracking;
use crate::verbs::run::find_program;
use dewar_guest::{Guest, Health};
use dewar_guest_qemu::handover::{HandoverError, Moved, Plan, Waiting};
use dewar_guest_qemu::{Discovered, QemuGuest, Qmp, discover};
use dewar_memory::{KernelError, ProcessHandle, Ram, WriteTracker};
use dewar_units::PageSet;
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::Instant;

pub fn run(context: &Context, args: UpgradeArgs) -> Result<(), Failure> {
    match &args.name {
        Some(name) => upgrade(context, name, &args),
        None => all::upgrade_all(context, &args),
    }
}

fn upgrade(context: &Context, name: &str, args: &UpgradeArgs) -> Result<(), Failure> {
    let began = Instant::now();
    let progress = Progress::new("looking at the guest");
    let held = context.hold(name)?;
    held.require_alive()?;
    wait_for_memory(&held, &progress)?;
    let Held { folder, record, lock } = held;
    let untouched = |failure: Failure| failure.state("the guest was not touched");
    let program = find_program(args.qemu.as_deref().unwrap_or(&record.program))?;
    let mut guest =
        QemuGuest::attach(folder.clone(), record).map_err(|error| untouched(error.into()))?;
    let before = guest.found().version.clone();
    let plan = Plan::new(&mut guest, &program).map_err(|error| untouched(error.into()))?;
    consent(context, name, &plan, args.yes, &progress)?;
    let tracking = Tracking::load(&folder, guest.record())?;

    let guardian = Guardian::start(context, name, None, guest.qmp(), &lock)?;
    progress.stage("starting the new QEMU");
    if let Some(tracking) = &tracking {
        tracking.strike_out(&folder)?;
    }
    let result = move_guest(&mut guest, plan, tracking.as_ref(), &progress);
    drop(progress);
    let (moved, tracked) = match result {
        Ok(moved) => moved,
        Err(error) => {
            let health = guest.health();
            let crashed = matches!(error, HandoverError::Crashed | HandoverError::Unknown(..));
            if crashed || matches!(health, Health::Running | Health::Paused | Health::Gone) {
                guardian.dismiss();
            }
            let failure = Failure::from(error);
            return Err(if crashed { failure } else { explain(failure, &health) });
        }
    };
    if let Some(tracking) = tracked {
        // Without it the next checkpoint compares; it loses nothing.
        let _ = Tracking { process: moved.record.process, ..tracking }.save(&folder);
    }
    guardian.dismiss();
    let ms = began.elapsed().as_secs_f64() * 1e3;
    report(context, &moved, &before, ms)
}

/// Starts the new QEMU and moves the guest to it. Returns what is tracked there,
/// but for the process.
fn move_guest(
    guest: &mut QemuGuest,
    plan: Plan,
    tracking: Option<&Tracking>,
    progress: &Progress,
) -> Result<(Moved, Option<Tracking>), HandoverError> {
    let old_ram = guest.ram();
    let mut waiting = plan.start(guest)?;
    progress.stage("started");
    let tracking = tracking.filter(|tracking| tracking.since.is_some());
    // Where the new process cannot be tracked the next checkpoint compares.
    let new = tracking.and_then(|_| arm(&mut waiting).ok());
    let old = ProcessHandle::open(dewar_memory::Pid(waiting.old_pid()))
        .map_err(|error| HandoverError::Guest(error.into()))?;
    let mut carried = None;
    progress.stage("armed");
    let moved = waiting.go(&|step| progress.signal_at(step), &mut || {
        carried = tracking.and_then(|tracking| written_before(&old, &old_ram, tracking).ok()?);
    })?;
    progress.signal_at("moved");
    let tracked = tracking.zip(new).zip(carried).map(|((tracking, tracker), before)| Tracking {
        tracker,
        before: before.ranges().map(|range| (range.start.0, range.end.0)).collect(),
        ..tracking.clone()
    });
    Ok((moved, tracked))
}

/// Begins to track the new process, before the guest runs in it.
fn arm(waiting: &mut Waiting<'_>) -> Result<u64, HandoverError> {
    let (process, ram, origin) = waiting.memory()?;
    let track = || -> Result<u64, KernelError> {
        let tracker = WriteTracker::attach(&process, &ram, origin, None)?;
        tracker.arm()?;
        tracker.identity()
    };
    track().map_err(|error| HandoverError::Guest(error.into()))
}

/// What was written in the old process, and before it, since the checkpoint;
/// nothing where that count was lost.
fn written_before(
    old: &ProcessHandle,
    ram: &Arc<Ram>,
    tracking: &Tracking,
) -> Result<Option<PageSet>, KernelError> {
    let Some(tracker) = WriteTracker::resume(old, ram, tracking.tracker)? else { return Ok(None) };
    tracker.count_in(&tracking.pages_before(ram.pages()));
    tracker.look(1).map(Some)
}

/// That nothing is lost, or that it may be.
fn consent(
    context: &Context,
    name: &str,
    plan: &Plan,
    yes: bool,
    progress: &Progress,
) -> Result<(), Failure> {
    if yes || plan.losses().is_empty() {
        return Ok(());
    }
    let losses = plan.losses().join("; ");
    let refused = || {
        Failure::new(Code::Failed, format!("upgrading '{name}': {losses}"))
            .state("the guest was not touched")
            .advice("'--yes' goes on all the same")
    };
    let terminal = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if context.json || !terminal {
        return Err(refused());
    }
    progress.aside(|| {
        eprint!("{name}: {losses}. Go on? [y/N] ");
        let _ = std::io::stderr().flush();
        let mut answer = String::new();
        let _ = std::io::stdin().read_line(&mut answer);
        answer.trim().eq_ignore_ascii_case("y").then_some(()).ok_or_else(refused)
    })
}

fn explain(failure: Failure, health: &Health) -> Failure {
    let failure = failure.state(format!("the guest was not moved; {health}"));
    match health {
        Health::Unknown(_) => failure.attention().advice("'dewar ps' tries to put it right"),
        _ => failure,
    }
}

fn report(context: &Context, moved: &Moved, before: &str, ms: f64) -> Result<(), Failure> {
    let record = &moved.record;
    let found = Qmp::connect(&record.qmp).ok().and_then(|mut qmp| discover(&mut qmp, record).ok());
    let after = found.map_or_else(|| "?".to_owned(), |found: Discovered| found.version);
    let stood = moved.downtime_ms.map(|ms| format!(", standing still for {ms} ms"));
    let mut text = format!(
        "{} runs in QEMU {after} as process {} (before: {before}) after {}{}",
        record.name,
        record.process.pid,
        milliseconds(ms),
        stood.unwrap_or_default()
    );
    for problem in &moved.problems {
        text.push_str(&format!("\nnot handed over: {problem}"));
    }
    context.print(
        json!({
            "name": record.name, "pid": record.process.pid, "qemu": after, "qemu_before": before,
            "program": record.program, "downtime_ms": moved.downtime_ms, "total_ms": ms,
            "not_handed_over": moved.problems,
        }),
        &text,
    );
    if moved.problems.is_empty() {
        return Ok(());
    }
    let what = format!("not all of what '{}' had could be handed over", record.name);
    Err(Failure::new(Code::Attention, what)
        .state("the guest runs in its new QEMU")
        .already_printed())
}
