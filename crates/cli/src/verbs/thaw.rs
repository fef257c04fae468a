//! `thaw`: a frozen guest goes on.

use crate::args::{ClockChoice, ThawArgs};
use crate::context::Context;
use crate::fan_out::Each;
use crate::output::milliseconds;
use crate::progress::Progress;
use crate::render::back::{all_forwarded, clock_json, clock_line, listed};
use crate::verbs::restore;
use dewar_lifecycle::ram_dir::OWN;
use dewar_lifecycle::restore::RestoreOptions;
use dewar_lifecycle::thaw::{ThawOptions, Thawed, is_frozen, thaw_in_place};
use dewar_lifecycle::{Code, Failure, NextGuest};
use dewar_registry::{GuestRecord, Kept};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

pub fn run(context: &Context, args: ThawArgs) -> Result<(), Failure> {
    let Some(name) = &args.which.name else {
        let frozen = |record: &GuestRecord| is_frozen(record).is_some();
        let end = |_: &Value| "goes on".to_owned();
        let verb = Each { verb: "thaw", doing: "thawing", done: "thawed", end: &end };
        let clock = if args.clock == ClockChoice::Keep { "--clock=keep" } else { "--clock=step" };
        return verb.of(context, frozen, args.which.jobs(2), &[clock.into()]);
    };
    let began = Instant::now();
    let progress = Progress::new("looking at the guest");
    let guest = context.lock(name)?;
    let Some(frozen) = is_frozen(&guest.record).cloned() else {
        return Err(Failure::new(Code::Failed, format!("guest '{name}' is not frozen")));
    };
    let keep_clock = args.clock == ClockChoice::Keep;
    if let Kept::InStore { store, image } = frozen.kept {
        // Ours may have to be mounted again.
        let folder = guest.record.ram.first().and_then(|file| file.path.parent());
        let ram_dir = folder.filter(|it| *it != Path::new(OWN)).map(Path::to_owned);
        drop((progress, guest));
        let options = RestoreOptions {
            name: Some(name.to_owned()),
            new_identity: false,
            eager: false,
            paused: !frozen.was_running,
            run: false,
            keep_clock,
            replace: false,
            // Its memory was promised to it before.
            overcommit: false,
            ram_dir,
            next: NextGuest::Thawed,
        };
        return restore::restore_from(context, &image, Some(&store), &options);
    }
    let options = ThawOptions { force: args.force, keep_clock };
    let thawed = thaw_in_place(guest, &frozen, options, &progress)?;
    drop(progress);
    let took = thawed.back_at.duration_since(began);
    report(context, &thawed, took.as_secs_f64() * 1e3)
}

fn report(context: &Context, thawed: &Thawed, ms: f64) -> Result<(), Failure> {
    let Thawed { record, was_running, state, unforwarded, clock, .. } = thawed;
    let name = &record.name;
    let how = match state.why_not_running() {
        Some(_) => format!("is {state}, as it was,"),
        None if *was_running => "runs".to_owned(),
        None => "is paused".to_owned(),
    };
    context.print_with(
        json!({
            "name": name, "pid": record.process.pid, "paused": !was_running,
            "state": state.to_string(), "total_ms": ms,
            "not_forwarded": unforwarded, "clock": clock.as_ref().map(clock_json),
        }),
        &format!(
            "{name} {how} as process {} after {}{}{}",
            record.process.pid,
            milliseconds(ms),
            listed(unforwarded),
            clock.as_ref().map_or_else(String::new, clock_line)
        ),
        all_forwarded(name, unforwarded).and_then(|()| match state.why_not_running() {
            Some(why) if *was_running => {
                let what = format!("'{name}' was thawed, and {why}");
                Err(Failure::new(Code::Attention, what).advice(state.advice().unwrap_or_default()))
            }
            _ => Ok(()),
        }),
    )
}
