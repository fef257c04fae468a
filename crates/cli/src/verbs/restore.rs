//! `restore`: a guest is brought back to the instant of a checkpoint.

use crate::args::{ClockChoice, RestoreArgs};
use crate::context::Context;
use crate::output::milliseconds;
use crate::progress::Progress;
use crate::render::back::{all_forwarded, clock_json, clock_line, listed};
use crate::verbs::doctor::require_tracking;
use dewar_guest_oci::is_container;
use dewar_guest_qemu::start_from_state::excluded_disks;
use dewar_image::{ImageId, Store};
use dewar_lifecycle::container::{self, ContainerRestore};
use dewar_lifecycle::restore::{RestoreOptions, Restored, restore, resume_service};
use dewar_lifecycle::text::foreign;
use dewar_lifecycle::{Code, Failure, NextGuest};
use serde_json::json;
use std::time::Instant;

pub fn run(context: &Context, args: RestoreArgs) -> Result<(), Failure> {
    require_tracking()?;
    let store = args.store.store.as_deref();
    if !args.replace && !args.new_identity {
        let name = args.name.as_deref();
        if let Some(name) = resume_service(context, &args.reference, name, store)? {
            context.print(
                json!({"name": name, "resumed": true}),
                &format!("the page server of {name} was gone and is replaced; the guest runs on"),
            );
            return Ok(());
        }
    }
    let options = RestoreOptions {
        name: args.name,
        new_identity: args.new_identity,
        eager: args.eager,
        paused: args.paused,
        run: args.run,
        keep_clock: args.clock == ClockChoice::Keep,
        replace: args.replace,
        overcommit: args.overcommit,
        ram_dir: args.ram_dir,
        next: NextGuest::Another,
    };
    restore_from(context, &args.reference, store, &options)
}

/// Restores the checkpoint that `reference` means in a store.
pub fn restore_from(
    context: &Context,
    reference: &str,
    store: Option<&str>,
    options: &RestoreOptions,
) -> Result<(), Failure> {
    let began = Instant::now();
    require_tracking()?;
    let progress = Progress::new("reading the checkpoint");
    let store = context.open_store(store)?;
    let id = store.find(reference)?;
    if is_container(&store.record(&id)?.machine) {
        return a_container(context, &store, &id, options, &progress, began);
    }
    restore(context, &store, &id, options, &progress, |restored| {
        progress.clear();
        let took = restored.back_at.duration_since(began);
        report(context, options, restored, took.as_secs_f64() * 1e3)
    })
}

/// Brings a container back.
fn a_container(
    context: &Context,
    store: &Store,
    id: &ImageId,
    options: &RestoreOptions,
    progress: &Progress,
    began: Instant,
) -> Result<(), Failure> {
    let for_machines = [
        (options.new_identity, "--new-identity"),
        (options.paused, "--paused"),
        (options.run, "--run"),
        (options.keep_clock, "--clock"),
        (options.overcommit, "--overcommit"),
        (options.ram_dir.is_some(), "--ram-dir"),
    ];
    if let Some((_, option)) = for_machines.iter().find(|(is_given, _)| *is_given) {
        let what =
            format!("checkpoint {id} is of a container, and {option} is for virtual machines");
        return Err(Failure::new(Code::Usage, what).state("nothing was done"));
    }
    let wanted = ContainerRestore { name: options.name.clone(), replace: options.replace };
    let record = container::restore(context, store, id, &wanted, progress)?;
    progress.clear();
    let ms = began.elapsed().as_secs_f64() * 1e3;
    let container = record.container.as_ref().map_or("", |it| it.id.as_str());
    context.print(
        json!({
            "name": record.name, "checkpoint": id, "pid": record.process.pid, "lazy": false,
            "container": container, "total_ms": ms,
        }),
        &format!(
            "{} runs as container {container}, process {}, from checkpoint {id}, after {}",
            record.name,
            record.process.pid,
            milliseconds(ms),
        ),
    );
    Ok(())
}

fn report(
    context: &Context,
    options: &RestoreOptions,
    restored: Restored,
    ms: f64,
) -> Result<(), Failure> {
    let Restored { checkpoint, record, state, reused, unforwarded, clock, .. } = restored;
    let id = &checkpoint.id;
    let excluded = excluded_disks(&checkpoint.machine);
    let empty = match excluded.is_empty() {
        true => String::new(),
        false => {
            format!("\nempty, since the checkpoint is without: {}", foreign(&excluded.join(", ")))
        }
    };
    let is_paused = state.is_paused();
    let how = match state.why_not_running() {
        Some(_) => format!("is {state}, as it was,"),
        None if is_paused && !options.paused => {
            "is paused, as it was (--run, or QMP 'cont', lets it run),".into()
        }
        None if is_paused => "is paused".into(),
        None => "runs".to_owned(),
    };
    let memory = if options.eager { "" } else { "; its memory is arriving" };
    context.print_with(
        json!({
            "name": record.name, "checkpoint": id, "pid": record.process.pid,
            "lazy": !options.eager,
            "paused": is_paused, "state": state.to_string(), "total_ms": ms, "pages_reused": reused,
            "not_forwarded": unforwarded, "clock": clock.as_ref().map(clock_json),
            "excluded": excluded, "new_addresses": restored.new_addresses,
        }),
        &format!(
            "{} {how} as process {}, from checkpoint {id}, after {}{memory}{empty}{}{}",
            record.name,
            record.process.pid,
            milliseconds(ms),
            listed(&unforwarded),
            clock.as_ref().map_or_else(String::new, clock_line)
        ),
        restored.identified.and_then(|()| all_forwarded(&record.name, &unforwarded)),
    )
}
