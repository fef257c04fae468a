//! `warm`: the pages that a guest uses are read into the page cache.

use crate::args::WarmArgs;
use crate::context::Context;
use crate::output::warn;
use crate::progress::Progress;
use dewar_checkpoint::Observer;
use dewar_lifecycle::page_cache::{known, learn, warm};
use dewar_lifecycle::{Code, Failure, Reporter};
use dewar_units::{ByteSize, PAGE_BYTES};
use serde_json::json;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

pub fn run(context: &Context, args: &WarmArgs) -> Result<(), Failure> {
    match args.learn {
        Some(window) => look(context, args, window),
        None => read(context, args),
    }
}

fn look(context: &Context, args: &WarmArgs, window: Duration) -> Result<(), Failure> {
    let name = &args.name;
    let progress = Progress::new("looking at the guest");
    progress.stage("watching its reads");
    let manifest = learn(context, name, window)?;
    drop(progress);
    if let Some(path) = &args.save {
        write(path, &manifest)?;
    }
    if manifest.lost > 0 {
        warn(&format!("the kernel had too much to tell: {} reads are not counted", manifest.lost));
    }
    let (files, bytes) = (manifest.files.len(), bytes_of(manifest.pages()));
    context.print(
        json!({
            "name": name, "window_ms": manifest.window_ms, "files": files, "hot_bytes": bytes,
            "lost": manifest.lost,
        }),
        &format!("{name} uses {} of {files} files again and again", ByteSize(bytes)),
    );
    Ok(())
}

fn read(context: &Context, args: &WarmArgs) -> Result<(), Failure> {
    let name = &args.name;
    let progress = Progress::new("looking at the guest");
    let (manifest, trees) = known(context, name, args.from.as_deref())?;
    progress.stage("reading what it uses");
    let (done, all) = (AtomicU64::new(0), manifest.pages());
    let most = args.limit.map_or(u64::MAX, |limit| limit.0);
    let warmed = warm(&trees, &manifest, most, &AtomicBool::new(false), &|pages| {
        progress.progress(done.fetch_add(pages, Ordering::Relaxed) + pages, all);
    });
    drop(progress);
    let (read, cached) = (bytes_of(warmed.read), bytes_of(warmed.cached));
    let mut text =
        format!("{} of {name} were read, {} were cached", ByteSize(read), ByteSize(cached));
    if !warmed.skipped.is_empty() {
        text += &format!("; {} files are others now, or gone", warmed.skipped.len());
    }
    if let Some(why) = warmed.stopped {
        text += &format!("; it ended before all was read: {why}");
    }
    context.print(
        json!({
            "name": name, "hot_bytes": bytes_of(all), "read_bytes": read, "cached_bytes": cached,
            "skipped": warmed.skipped, "stopped": warmed.stopped,
        }),
        &text,
    );
    Ok(())
}

fn bytes_of(pages: u64) -> u64 {
    pages * PAGE_BYTES as u64
}

fn write(path: &Path, manifest: &impl serde::Serialize) -> Result<(), Failure> {
    let written = serde_json::to_vec(manifest)
        .map_err(std::io::Error::from)
        .and_then(|bytes| std::fs::write(path, bytes));
    written.map_err(|error| {
        Failure::new(Code::Failed, format!("writing {}: {error}", path.display()))
            .state("what was learnt is kept with the guest")
    })
}
