//! `upgrade`: another QEMU under a guest that runs.

use crate::args::UpgradeArgs;
use crate::context::{Context, attach};
use crate::failure::{Code, Failure, GONE};
use crate::guardian::Guardian;
use crate::output::milliseconds;
use crate::progress::Progress;
use crate::tracking::{self, Tracking, written_before};
use crate::verbs::fan_out::Each;
use crate::verbs::run::find_program;
use dewar_guest::{Guest, Health};
use dewar_guest_qemu::QemuGuest;
use dewar_guest_qemu::handover::{HandoverError, Moved, Plan};
use dewar_memory::ProcessHandle;
use dewar_registry::GuestRecord;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::time::Instant;

pub fn run(context: &Context, args: UpgradeArgs) -> Result<(), Failure> {
    match &args.which.name {
        Some(name) => upgrade(context, name, &args),
        None => {
            let mut more: Vec<OsString> = args.yes.then(|| "--yes".into()).into_iter().collect();
            more.extend(args.qemu.iter().flat_map(|path| ["--qemu".into(), path.into()]));
            let running = |record: &GuestRecord| record.process.is_alive();
            let end = |told: &Value| format!("now QEMU {}", told["qemu"].as_str().unwrap_or("?"));
            let verb = Each { verb: "upgrade", doing: "upgrading", done: "upgraded", end: &end };
            verb.of(context, running, args.which.jobs(1), &more)
        }
    }
}

fn upgrade(context: &Context, name: &str, args: &UpgradeArgs) -> Result<(), Failure> {
    let began = Instant::now();
    let progress = Progress::new("looking at the guest");
    let (mut guest, folder, lock) = attach(context, name, &progress)?;
    let untouched = |failure: Failure| failure.state("the guest was not touched");
    let program = find_program(args.qemu.as_deref().unwrap_or(&guest.record().program))?;
    let before = guest.found().version.clone();
    let plan = Plan::new(&mut guest, &program).map_err(|error| untouched(error.into()))?;
    consent(context, name, &plan, args.yes, &progress)?;
    let tracking = Tracking::load(&folder, guest.record())?;

    let guardian = Guardian::start(context, name, None, guest.qmp(), &lock)?;
    progress.stage("starting the new QEMU");
    if let Some(tracking) = &tracking {
        tracking.invalidate(&folder)?;
    }
    let result = move_guest(&mut guest, plan, tracking.as_ref(), &progress);
    drop(progress);
    let (moved, tracked) = match result {
        Ok(moved) => moved,
        Err(error) => {
            if let HandoverError::Unfinished(_) = error {
                // The guardian goes on with it when we end.
                return Err(error.into());
            }
            let health = guest.health();
            let crashed = matches!(error, HandoverError::Crashed | HandoverError::Unknown(..));
            if crashed
                || matches!(
                    health,
                    Health::Running
                        | Health::Paused
                        | Health::Stands(_)
                        | Health::Gone
                        | Health::ShutDown
                )
            {
                guardian.dismiss();
            }
            let failure = Failure::from(error);
            return Err(if crashed { failure } else { explain(failure, &health) });
        }
    };
    if let Some(tracking) = tracked {
        // Without it the next checkpoint compares; it loses nothing.
        let _ = tracking.save(&folder);
    }
    guardian.dismiss();
    let ms = began.elapsed().as_secs_f64() * 1e3;
    report(context, &moved, &before, ms)
}

/// Starts the new QEMU and moves the guest to it. Returns what is tracked there.
fn move_guest(
    guest: &mut QemuGuest,
    plan: Plan,
    tracking: Option<&Tracking>,
    progress: &Progress,
) -> Result<(Moved, Option<Tracking>), HandoverError> {
    let (old_ram, old) = (guest.ram(), guest.process().pid());
    let old = ProcessHandle::open(old).map_err(|error| HandoverError::Guest(error.into()))?;
    let mut waiting = plan.start(guest)?;
    progress.stage("started");
    let tracking = tracking.filter(|tracking| tracking.since.is_some());
    // Where the new process cannot be tracked the next checkpoint compares.
    let new = tracking.and_then(|_| {
        let (process, ram, origin) = waiting.memory().ok()?;
        tracking::arm(&process, &ram, origin).ok()
    });
    let mut carried = None;
    progress.stage("armed");
    let moved = waiting.go(&|step| progress.signal_at(step), &mut || {
        carried = tracking.and_then(|tracking| written_before(&old, &old_ram, tracking).ok()?);
    })?;
    progress.signal_at("moved");
    let tracked = tracking.zip(new).zip(carried).map(|((tracking, tracker), before)| {
        tracking.continued(moved.record.process, tracker, &before)
    });
    Ok((moved, tracked))
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
        Health::Gone => failure.attention().advice(GONE),
        _ => failure,
    }
}

fn report(context: &Context, moved: &Moved, before: &str, ms: f64) -> Result<(), Failure> {
    let record = &moved.record;
    let after = moved.version.as_deref().unwrap_or("?");
    let stood = moved.downtime_ms.map(|ms| format!(", standing still for {ms} ms"));
    let mut text = format!(
        "{} runs in QEMU {after} as process {} (before: {before}) after {}{}",
        record.name,
        record.process.pid,
        milliseconds(ms),
        stood.unwrap_or_default()
    );
    for problem in &record.not_handed_over {
        text.push_str(&format!("\nnot handed over: {problem}"));
    }
    let end = if record.not_handed_over.is_empty() {
        Ok(())
    } else {
        let what = format!("not all of what '{}' had could be handed over", record.name);
        Err(Failure::new(Code::Attention, what).state("the guest runs in its new QEMU"))
    };
    context.print_with(
        json!({
            "name": record.name, "pid": record.process.pid, "qemu": after, "qemu_before": before,
            "program": record.program, "downtime_ms": moved.downtime_ms, "total_ms": ms,
            "not_handed_over": record.not_handed_over,
        }),
        &text,
        end,
    )
}
