//! `host-reboot`: another kernel under the guests.

use crate::args::HostRebootArgs;
use crate::context::Context;
use crate::progress::Progress;
use crate::render::host_reboot::{note_json, note_text, plan_json, plan_text};
use dewar_lifecycle::host_reboot::{Arrival, Note, Outcome, Request, arrive, leave, plan, recover};
use dewar_lifecycle::{Code, Failure};
use serde_json::json;

pub fn run(context: &Context, args: &HostRebootArgs) -> Result<(), Failure> {
    if args.thaw {
        return thaw(context);
    }
    let progress = Progress::new("looking at the guests");
    if !args.dry_run {
        // Guests that a dead one of us froze are to go on first.
        if let Some(failure) = recover(context, &progress)?.into_iter().next() {
            return Err(failure);
        }
    }
    let request = Request {
        kernel: args.kernel.clone(),
        initrd: args.initrd.clone(),
        append: args.append.clone(),
        others: args.others.into(),
        fallback: args.fallback.map(Into::into),
        checksums: !args.no_checksum,
        now: args.now,
    };
    let plan = plan(context, &request, &progress)?;
    if args.dry_run {
        drop(progress);
        let end = plan.require();
        return context.print_with(plan_json(&plan), &plan_text(&plan), end);
    }
    leave(context, &plan, &progress)?;
    drop(progress);
    let (count, kernel) = (plan.guests.len(), &plan.kernel.version);
    context.print(
        plan_json(&plan),
        &format!("{count} guests wait; the host goes down for Linux {kernel}"),
    );
    Ok(())
}

fn thaw(context: &Context) -> Result<(), Failure> {
    let progress = Progress::new("looking for guests that were kept");
    let arrival = arrive(context, &progress)?;
    drop(progress);
    match arrival {
        Arrival::Nothing => {
            context.print(
                json!({"rebooted": false, "guests": []}),
                "no guest waits for a reboot of the host",
            );
            Ok(())
        }
        Arrival::NotRebooted(failures) => match failures.into_iter().next() {
            Some(failure) => Err(failure),
            None => {
                let text = "the host was not rebooted; the guests go on";
                context.print(json!({"rebooted": false, "guests": []}), text);
                Ok(())
            }
        },
        Arrival::Rebooted(note) => {
            let end = failed(&note);
            context.print_with(note_json(&note), &note_text(&note), end)
        }
    }
}

fn failed(note: &Note) -> Result<(), Failure> {
    let is_back = |outcome: &Option<Outcome>| outcome.as_ref().is_some_and(Outcome::is_as_it_was);
    let away = note.guests.iter().filter(|it| !is_back(&it.outcome)).count();
    match away {
        0 => Ok(()),
        _ => {
            let what = format!("{away} of {} guests are not as they were", note.guests.len());
            Err(Failure::new(Code::Attention, what))
        }
    }
}
