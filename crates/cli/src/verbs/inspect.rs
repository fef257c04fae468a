use crate::args::InspectArgs;
use crate::context::Context;
use crate::output::table;
use crate::render::guest::state;
use dewar_guest_qemu::discover;
use dewar_lifecycle::Failure;
use dewar_lifecycle::process::connect;
use dewar_lifecycle::served_disks::{LastReset, SearchState, ServedDisks, ServedState};
use dewar_registry::GuestFolder;
use dewar_units::{ByteSize, PAGE_BYTES};
use serde_json::{Value, json};

pub fn run(context: &Context, args: InspectArgs) -> Result<(), Failure> {
    // What cannot be finished with it is told with the rest.
    let (held, trouble) = match context.lock(&args.name) {
        Ok(held) => (held, None),
        Err(failure) if failure.is_attention() => {
            (context.lock_to_end(&args.name)?, Some(failure.whole()))
        }
        Err(failure) => return Err(failure),
    };
    let (folder, record) = (held.folder.clone(), held.record.clone());
    let found = record
        .process
        .is_alive()
        .then_some(())
        .filter(|()| record.container.is_none())
        .map(|()| connect(&record).map(|mut qmp| discover(&mut qmp, &record)));
    drop(held);
    let state = state(&folder, &record);
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut row = |name: &str, value: String| rows.push(vec![name.to_owned(), value]);
    row("name", record.name.clone());
    row("state", state.clone());
    row("process", record.process.pid.to_string());
    match &record.container {
        Some(container) => {
            row("container", container.id.clone());
            row("runtime", container.runtime.display().to_string());
            row("bundle", container.bundle.display().to_string());
        }
        None => {
            row("program", record.program.display().to_string());
            row("command line", record.arguments.join(" "));
            row("folder", record.folder.display().to_string());
            row("QMP socket", record.qmp.display().to_string());
        }
    }
    for file in &record.ram {
        row("RAM", format!("{} {} {}", file.id, ByteSize(file.bytes), file.path.display()));
    }
    if let Some(origin) = &record.origin {
        row("restored from", format!("{} in {}", origin.image, origin.store));
    }
    for what in &record.not_handed_over {
        row("not handed over", what.clone());
    }
    let mut disks = Vec::new();
    let mut problems: Vec<String> = trouble.into_iter().collect();
    let mut versions = Value::Null;
    match found {
        Some(Ok(Ok(found))) => {
            row("QEMU", format!("{}, machine {}", found.version, found.machine));
            versions = json!({"qemu": found.version, "machine": found.machine});
            for disk in &found.disks {
                let size = ByteSize(disk.info.virtual_bytes);
                row(
                    "disk",
                    format!("{} {size} in {} ({})", disk.info.name, disk.file, disk.format),
                );
                disks.push(json!({
                    "name": disk.info.name, "current_file": disk.file, "format": disk.format,
                    "virtual_bytes": disk.info.virtual_bytes,
                }));
            }
        }
        Some(Ok(Err(error))) => problems.push(error.to_string()),
        Some(Err(failure)) => problems.push(format!("{failure}")),
        None => {}
    }
    let served = served_disks(&folder, &mut row);
    for problem in &problems {
        row("problem", problem.clone());
    }
    let json = json!({
        "name": record.name, "state": state, "pid": record.process.pid, "guest": record,
        "disks": disks, "served_disks": served, "versions": versions, "problems": problems,
    });
    context.print(json, &table(&["", ""], rows));
    Ok(())
}

/// The disks that Dewar serves, and what of them outlived the last reboot.
fn served_disks(folder: &GuestFolder, row: &mut impl FnMut(&str, String)) -> Value {
    let Ok(Some(served)) = ServedDisks::of(folder) else { return Value::Null };
    let now = ServedState::of(folder).unwrap_or_default();
    let last = LastReset::of(folder);
    for disk in &served.disks {
        let kind = if disk.is_warm { "warm cache" } else { "no cache" };
        row(
            "served disk",
            format!("{} {} ({}, {kind})", disk.id, disk.path.display(), disk.format),
        );
        for it in now.disks.iter().filter(|it| it.id == disk.id && disk.is_warm) {
            let bytes = |blocks: u64| ByteSize(blocks * PAGE_BYTES as u64);
            row(
                "",
                format!(
                    "{} read from memory, {} from the disk, {} still kept, {} known; {} pages refused",
                    bytes(it.from_memory),
                    bytes(it.from_disk),
                    bytes(it.kept),
                    bytes(it.known),
                    it.wrong
                ),
            );
        }
    }
    if let Some(last) = &last {
        let cold = last.cold.as_ref().map(|why| format!("; nothing was kept: {why}"));
        let cold = cold.unwrap_or_default();
        let copied = last.copied.as_ref().map(|why| format!("; its memory was copied: {why}"));
        let copied = copied.unwrap_or_default();
        row("resets", format!("{}, the last held {:.0} ms{cold}{copied}", last.held, last.held_ms));
    }
    if let Some(why) = now.search.as_ref().and_then(why_little_was_kept) {
        row("", why.to_owned());
    }
    if let Some(why) = &now.released {
        row("given up", why.clone());
    }
    let disks = served.disks.iter().map(|disk| {
        let mut told = json!(disk);
        let its = now.disks.iter().find(|it| it.id == disk.id).map(|it| json!(it));
        if let (Value::Object(told), Some(Value::Object(its))) = (&mut told, its) {
            told.extend(its);
        }
        told
    });
    let disks: Vec<Value> = disks.collect();
    json!({"disks": disks, "search": now.search, "released": now.released, "last_reset": last})
}

/// Why less than nine tenths of what was known of the disks was found in memory, if so.
fn why_little_was_kept(search: &SearchState) -> Option<&'static str> {
    let SearchState { known, kept, too_many, .. } = search;
    match kept * 10 >= known * 9 {
        true => None,
        false if too_many * 10 >= *known => {
            Some("there was no room for more: its cache-size, or the host's free memory")
        }
        false => Some(
            "the rest was not in its memory any more, or changed; a guest that clears what it frees \
             (init_on_free=1), or firmware that clears memory, leaves little",
        ),
    }
}
