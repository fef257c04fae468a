//! `qos`: a guest's threads under a reservation that follows what its jobs need.

mod release;
mod status;
mod view;

use crate::args::{ByChoice, LawChoice, QosArgs};
use crate::context::Context;
use crate::output::{print, warn};
use crate::render::qos::{line, sum, to_json};
use dewar_lifecycle::qos::{QosOptions, background, serve};
use dewar_lifecycle::{Code, Failure};
use dewar_qos::{LawKind, Mechanism};
use serde_json::json;
use view::View;

pub use status::stray_line;

pub fn run(context: &Context, args: QosArgs) -> Result<(), Failure> {
    refuse_nonsense(context, &args)?;
    let ledger = context.qos_ledger();
    ledger.recover();
    match (&args.name, args.target) {
        _ if args.status => status::run(context, &ledger, &args),
        (Some(name), _) if args.release => release::guest(context, &ledger, name),
        (None, _) if args.release => release::process(context, &ledger, args.pid.unwrap_or(0)),
        (Some(name), Some(rate)) if args.detach => start_in_background(context, name, rate),
        (Some(name), Some(rate)) => hold(context, name, &options(rate, &args)),
        _ => Err(Failure::new(Code::Usage, "a name and a --target are needed")),
    }
}

/// Options that contradict each other.
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

fn options(rate: f64, args: &QosArgs) -> QosOptions {
    QosOptions {
        rate,
        miss: args.miss,
        min: args.min,
        max: args.max,
        process: args.pid.map(|pid| (pid, args.threads.into())),
        port: args.port.clone(),
        law: match (args.law, args.patience) {
            (LawChoice::Demand, _) => LawKind::Demand,
            (LawChoice::Stepwise, patience) => LawKind::Stepwise { patience },
        },
        mechanism: match args.by {
            ByChoice::Weight => Mechanism::Weight,
            _ => Mechanism::Deadline { reclaim: args.reclaim },
        },
        or_by_weight: args.by == ByChoice::Auto,
        overcommit: args.overcommit,
    }
}

/// Holds a guest's deadlines until Ctrl-C or the guest's end.
fn hold(context: &Context, name: &str, options: &QosOptions) -> Result<(), Failure> {
    let mut view = None;
    let seen = serve(context, name, options, &warn, &mut |entry| {
        // Not before: its thread would take the signals that end the controller.
        view.get_or_insert_with(View::start).show(line(entry));
    })?;
    drop(view);
    if let Some(entry) = seen {
        let mut report = to_json(&entry);
        report["ended"] = json!(true);
        context.print(report, &format!("{name}: {}; its threads are as they were", sum(&entry)));
    }
    Ok(())
}

fn start_in_background(context: &Context, name: &str, rate: f64) -> Result<(), Failure> {
    let words = std::env::args_os().skip(1).filter(|word| word != "--detach");
    let started = background::start(words).map_err(|not_started| {
        if context.json && !not_started.printed.is_empty() {
            print(not_started.printed.trim_end());
            return not_started.failure.already_printed();
        }
        not_started.failure
    })?;
    eprint!("{}", started.said);
    let pid = started.process.pid;
    context.print(
        json!({"name": name, "controller": pid, "target_per_s": rate}),
        &format!(
            "process {pid} gives {name} the CPU for {rate} jobs a second; 'dewar qos --status' \
             tells how it fares, 'dewar qos {name} --release' ends it"
        ),
    );
    Ok(())
}
