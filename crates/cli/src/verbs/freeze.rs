//! `freeze`: a guest that needs no process.

use crate::args::FreezeArgs;
use crate::context::Context;
use crate::fan_out::Each;
use crate::output::milliseconds;
use crate::progress::Progress;
use dewar_lifecycle::freeze::{self as lifecycle, Place};
use dewar_lifecycle::{AttachedGuest, Failure};
use dewar_registry::{GuestRecord, Kept};
use dewar_units::ByteSize;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::time::Instant;

pub fn run(context: &Context, args: FreezeArgs) -> Result<(), Failure> {
    let Some(name) = &args.which.name else {
        let mut more: Vec<OsString> = Vec::new();
        more.extend(args.no_checksum.then(|| "--no-checksum".into()));
        more.extend(args.to_store.iter().map(|url| match url.as_str() {
            "" => "--to-store".into(),
            url => format!("--to-store={url}").into(),
        }));
        more.push(format!("--wait={}s", args.wait.as_secs_f64()).into());
        let running = |record: &GuestRecord| record.process.is_alive();
        let end = |_: &Value| "frozen".to_owned();
        let verb = Each { verb: "freeze", doing: "freezing", done: "frozen", end: &end };
        return verb.of(context, running, args.which.jobs(2), &more);
    };
    let began = Instant::now();
    let progress = Progress::new("looking at the guest");
    let attached = AttachedGuest::lock(context, name, args.wait, &progress)?;
    let place = match args.to_store.as_deref() {
        None => Place::InPlace { checksums: !args.no_checksum, holder: None },
        Some(url) => {
            Place::InStore(context.store_location(Some(url).filter(|url| !url.is_empty()))?)
        }
    };
    let record = lifecycle::freeze(context.registry.root(), attached, place, &progress)?;
    drop(progress);
    report(context, &record, began.elapsed().as_secs_f64() * 1e3);
    Ok(())
}

fn report(context: &Context, record: &GuestRecord, ms: f64) {
    let bytes: u64 = record.ram.iter().map(|file| file.bytes).sum();
    let name = &record.name;
    let (place, image) = match record.frozen.as_ref().map(|frozen| &frozen.kept) {
        Some(Kept::InStore { image, .. }) => (format!("in checkpoint {image}"), Some(image)),
        _ => ("where it was".to_owned(), None),
    };
    context.print(
        json!({"name": name, "memory_bytes": bytes, "checkpoint": image, "total_ms": ms}),
        &format!(
            "{name} is frozen after {}; its {} of memory are {place}\n'dewar thaw {name}' lets it \
             go on",
            milliseconds(ms),
            ByteSize(bytes)
        ),
    );
}
