//! `migrate`: a guest goes on at another host.

use crate::args::{CodecChoice, GpuChoice, MigrateArgs};
use crate::context::Context;
use crate::output::{milliseconds, warn};
use crate::progress::Progress;
use crate::report::{Drawing, migration};
use dewar_lifecycle::migrate::{
    self as lifecycle, Ending, GpuUsed, MigrateOptions, Migrated, MovingDisks, Prediction, Resumed,
    Way, abort_here, take_back,
};
use dewar_lifecycle::migration::OtherHost;
use dewar_lifecycle::{AttachedGuest, Code, Failure, Reporter};
use dewar_registry::Phase;
use dewar_units::{ByteSize, PAGE_BYTES};
use serde_json::json;
use std::time::Duration;

pub fn run(context: &Context, args: MigrateArgs) -> Result<(), Failure> {
    let name = &args.name;
    if args.take_back {
        take_back(context, name)?;
        context.print(json!({"name": name, "ended": "back"}), &format!("{name} goes on here"));
        return Ok(());
    }
    if args.resume || args.abort {
        return end(context, &args);
    }
    if args.gpu == GpuChoice::Always && args.codec != CodecChoice::Auto {
        let what = "'--gpu always' needs '--codec auto', which chooses between it and the cores";
        return Err(Failure::new(Code::Usage, what));
    }
    let there = OtherHost {
        via: args.via.as_deref(),
        host: args.host.as_deref(),
        dewar: &args.remote_dewar,
        root: args.remote_root.as_deref(),
    };
    let progress = Progress::new("looking at the guest");
    let other = there.name();
    let options = MigrateOptions {
        peer: there.receiver(),
        max_downtime: args.max_downtime,
        compression: args.codec.into(),
        gpu: args.gpu.into(),
        post_copy: args.postcopy.into(),
        throttle: args.throttle,
        disks: MovingDisks { copy: args.with_disks, map: args.disk_map },
        // A command of the user's may lead where no address does.
        way: match args.tunnel || (args.via.is_some() && args.address.is_none()) {
            true => Way::Tunnel,
            false => Way::Direct(args.address.clone()),
        },
    };
    if context.registry.guest(name)?.record()?.container.is_some() {
        let locked = context.lock(name)?;
        if args.dry_run {
            let found = lifecycle::predict_container(locked, &options, &progress)?;
            drop(progress);
            foretell(context, name, other, &found, "a longer '--max-downtime' may move it");
            return Ok(());
        }
        let drawing = args.report.as_deref().map(Drawing::open).transpose()?;
        let root = context.registry.root();
        let moved = lifecycle::migrate_container(root, locked, &options, &progress)?;
        draw(drawing, name, other, &moved, &progress);
        drop(progress);
        report(context, name, other, &moved);
        return Ok(());
    }
    let attached = AttachedGuest::lock(context, name, Duration::ZERO, &progress)?;
    if args.dry_run {
        let found = lifecycle::predict(attached, &options, &progress)?;
        drop(progress);
        foretell(context, name, other, &found, "'--postcopy' moves it all the same");
        return Ok(());
    }
    // A path that cannot be written must be found before the guest leaves.
    let drawing = args.report.as_deref().map(Drawing::open).transpose()?;
    let ledger = context.qos_ledger();
    ledger.recover();
    let process = attached.guest.record().process;
    let reservation = ledger.entry(name).filter(|entry| entry.process == process);
    let moved = lifecycle::migrate(context.registry.root(), attached, &options, &progress)?;
    draw(drawing, name, other, &moved, &progress);
    drop(progress);
    report(context, name, other, &moved);
    match reservation.map(|entry| there.reserve(name, &entry)) {
        Some(Err(failure)) => warn(&failure.whole()),
        Some(Ok(said)) if !said.is_empty() => warn(&format!("{other}: {said}")),
        _ => {}
    }
    Ok(())
}

fn draw(
    drawing: Option<Drawing<'_>>,
    name: &str,
    other: &str,
    moved: &Migrated,
    progress: &Progress,
) {
    if let Some(Err(error)) =
        drawing.map(|drawing| drawing.write(&migration::page(name, other, moved)))
    {
        progress.warn(&error.to_string());
    }
}

fn report(context: &Context, name: &str, other: &str, moved: &Migrated) {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    context.print(
        json!({
            "name": name, "to": other, "total_ms": ms(moved.total), "gap_ms": ms(moved.gap),
            "pages": moved.pages, "bytes": moved.bytes, "state_bytes": moved.state_bytes,
            "epochs": moved.epochs, "post_copy_pages": moved.post_copy_pages,
            "stages_ms": {
                "reached": ms(moved.stages.reached), "memory_sent": ms(moved.stages.memory_sent),
                "stopped": ms(moved.stages.stopped), "runs_there": ms(moved.stages.runs_there),
            },
            "same_pages": moved.same_pages, "delta_pages": moved.delta_pages,
            "gpu": {
                "name": moved.gpu.name, "pages": moved.gpu.pages, "failure": moved.gpu.failure,
            },
        }),
        &format!(
            "{name} runs at {other} after {}, standing still for {}; {} were sent{}{}",
            milliseconds(ms(moved.total)),
            milliseconds(ms(moved.gap)),
            ByteSize(moved.bytes),
            match moved.post_copy_pages {
                0 => String::new(),
                pages => format!(", {pages} pages when it ran there already"),
            },
            match &moved.gpu {
                GpuUsed { name: Some(name), pages: 1.., .. } => {
                    format!(
                        "; {name} compressed {} of them",
                        ByteSize(moved.gpu.pages * PAGE_BYTES as u64)
                    )
                }
                _ => String::new(),
            },
        ),
    );
    if let Some(failure) = &moved.gpu.failure {
        warn(&format!("the GPU was left: {failure}"));
    }
}

/// Tells what a migration would be like; `otherwise`, what may help where it would not end.
fn foretell(context: &Context, name: &str, other: &str, found: &Prediction, otherwise: &str) {
    let memory = ByteSize(found.memory_bytes);
    let speed = |bytes: f64| format!("{}/s", ByteSize(bytes as u64));
    let writes = speed(found.written_per_second);
    let how = match found.total {
        Some(total) => format!("in about {:.1} s, writing {writes} or more", total.as_secs_f64()),
        None => format!("but writes {writes} or more: {otherwise}"),
    };
    context.print(
        json!({
            "name": name, "to": other, "memory_bytes": found.memory_bytes,
            "sent_bytes": found.sent_bytes, "bytes_per_second": found.bytes_per_second,
            "written_per_second": found.written_per_second,
            "total_ms": found.total.map(|total| total.as_secs_f64() * 1e3),
        }),
        &format!(
            "{other} takes {name}: {memory} of memory, at {}, {how}",
            speed(found.bytes_per_second)
        ),
    );
}

/// Brings a migration to its end whose connection was lost.
fn end(context: &Context, args: &MigrateArgs) -> Result<(), Failure> {
    let name = &args.name;
    let progress = Progress::new("looking at the guest");
    let arrives = context.lock(name)?.record.phase == Phase::Arriving;
    if arrives && args.abort {
        abort_here(context, name)?;
        drop(progress);
        context.print(json!({"name": name, "ended": "refused"}), &format!("{name} is refused"));
        return Ok(());
    }
    let ending = if args.abort { Ending::Back } else { Ending::Forward };
    let ended = lifecycle::resume(context, name, ending, &progress)?;
    drop(progress);
    let (word, text) = match ended {
        Resumed::Gone => ("gone", format!("{name} runs at the other host; nothing is left here")),
        Resumed::Back => ("back", format!("{name} goes on here")),
    };
    context.print(json!({"name": name, "ended": word}), &text);
    Ok(())
}
