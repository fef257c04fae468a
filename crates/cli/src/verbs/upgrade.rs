//! `upgrade`: another QEMU under a guest that runs.

use crate::args::UpgradeArgs;
use crate::context::Context;
use crate::fan_out::Each;
use crate::output::milliseconds;
use crate::progress::Progress;
use crate::verbs::run::find_program;
use dewar_guest_qemu::handover::{Moved, Plan};
use dewar_lifecycle::{AttachedGuest, Code, Failure, upgrade as lifecycle};
use dewar_registry::GuestRecord;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

pub fn run(context: &Context, args: UpgradeArgs) -> Result<(), Failure> {
    match &args.which.name {
        Some(name) => upgrade(context, name, &args),
        None => {
            let mut more: Vec<OsString> = args.yes.then(|| "--yes".into()).into_iter().collect();
            more.extend(args.qemu.iter().flat_map(|path| ["--qemu".into(), path.into()]));
            let running = |record: &GuestRecord| record.process.is_alive();
            let end =
                |report: &Value| format!("now QEMU {}", report["qemu"].as_str().unwrap_or("?"));
            let verb = Each { verb: "upgrade", doing: "upgrading", done: "upgraded", end: &end };
            verb.of(context, running, args.which.jobs(1), &more)
        }
    }
}

fn upgrade(context: &Context, name: &str, args: &UpgradeArgs) -> Result<(), Failure> {
    let began = Instant::now();
    let progress = Progress::new("looking at the guest");
    let mut attached = AttachedGuest::lock(context, name, Duration::ZERO, &progress)?;
    let guest = &mut attached.guest;
    let program = find_program(args.qemu.as_deref().unwrap_or(&guest.record().program))?;
    let before = guest.found().version.clone();
    let plan = Plan::new(guest, &program)
        .map_err(|error| Failure::from(error).state("the guest was not touched"))?;
    consent(context, name, &plan, args.yes, &progress)?;
    let moved = lifecycle::upgrade(context.registry.root(), &mut attached, plan, &progress)?;
    drop(progress);
    report(context, &moved, &before, began.elapsed().as_secs_f64() * 1e3)
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
