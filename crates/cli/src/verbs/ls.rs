use crate::args::LsArgs;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{ago, milliseconds, table};
use crate::verbs::checkpoint::to_json;
use dewar_image::{ImageError, Store};
use dewar_units::{ByteSize, PAGE_BYTES};
use serde_json::{Value, json};

pub fn run(context: &Context, args: LsArgs) -> Result<(), Failure> {
    let location = context.store_location(args.store.store.as_deref())?;
    let store = match Store::open(&location) {
        Err(ImageError::NoStore { url }) => {
            let text = format!("no checkpoints: there is no store in {url} yet");
            context.print(json!({"checkpoints": [], "problems": []}), &text);
            return Ok(());
        }
        opened => opened?,
    };
    let (mut records, problems) = store.records()?;
    records.retain(|record| args.guest.as_ref().is_none_or(|guest| record.guest == *guest));
    let rows = records
        .iter()
        .map(|record| {
            vec![
                record.id.to_string(),
                record.guest.clone(),
                record.tag.clone().unwrap_or_else(|| "-".to_owned()),
                ago(record.created_ms),
                ByteSize(record.memory.pages * PAGE_BYTES as u64).to_string(),
                ByteSize(record.summary.stored_bytes).to_string(),
                ByteSize(record.summary.inherited_bytes).to_string(),
                milliseconds(record.summary.pause_ms),
            ]
        })
        .collect::<Vec<_>>();
    let mut text = if rows.is_empty() {
        "no checkpoints".to_owned()
    } else {
        table(
            &["checkpoint", "guest", "tag", "taken", ">memory", ">own", ">shared", ">paused"],
            rows,
        )
    };
    for problem in &problems {
        text.push_str(&format!("\nproblem: {problem}"));
    }
    let list: Vec<Value> = records.iter().map(|record| to_json(record, &store)).collect();
    let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    context.print(json!({"checkpoints": list, "problems": problems}), &text);
    Ok(())
}
