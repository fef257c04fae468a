//! `cool-report`: how much of a guest's files is in the page cache.

use crate::args::CoolReportArgs;
use crate::context::Context;
use crate::output::table;
use dewar_lifecycle::Failure;
use dewar_lifecycle::page_cache::{FileCached, report};
use dewar_units::{ByteSize, PAGE_BYTES};
use serde_json::{Value, json};

pub fn run(context: &Context, args: &CoolReportArgs) -> Result<(), Failure> {
    let (manifest, files) = report(context, &args.name, args.all)?;
    // Where nothing is known of what it uses, all that is cached is told.
    let shows_all = args.all || manifest.is_none();
    let shown: Vec<&FileCached> = files.iter().filter(|it| shows_all || it.hot > 0).collect();
    let size = |pages: u64| ByteSize(pages * PAGE_BYTES as u64).to_string();
    let row = |file: &&FileCached| {
        let numbers = [file.pages, file.cached, file.hot, file.missing].map(size);
        std::iter::once(file.path.display().to_string()).chain(numbers).collect()
    };
    let list: Vec<Value> = shown
        .iter()
        .map(|file| {
            let bytes = |pages: u64| pages * PAGE_BYTES as u64;
            json!({
                "path": file.path, "bytes": bytes(file.pages), "cached_bytes": bytes(file.cached),
                "hot_bytes": bytes(file.hot), "missing_bytes": bytes(file.missing),
            })
        })
        .collect();
    let headings = ["file", ">size", ">cached", ">hot", ">missing"];
    context.print(
        json!({"name": args.name, "is_known": manifest.is_some(), "files": list}),
        &table(&headings, shown.iter().map(row).collect()),
    );
    Ok(())
}
