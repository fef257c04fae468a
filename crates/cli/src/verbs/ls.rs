use crate::args::LsArgs;
use crate::context::{Context, warn_of};
use crate::output::{ago, milliseconds, table};
use crate::render::checkpoint::to_json;
use dewar_guest_qemu::start_from_state::excluded_disks;
use dewar_image::{ImageError, Record, Store};
use dewar_lifecycle::Failure;
use dewar_lifecycle::text::foreign;
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
    warn_of(&store);
    let (mut records, problems) = store.records()?;
    records.retain(|record| args.guest.as_ref().is_none_or(|guest| record.guest == *guest));
    let rows: Vec<_> = records.iter().map(row).collect();
    let mut text = if rows.is_empty() {
        "no checkpoints".to_owned()
    } else {
        table(
            &["checkpoint", "guest", "tag", "taken", ">memory", ">own", ">shared", ">paused"],
            rows,
        )
    };
    for record in &records {
        let excluded = excluded_disks(&record.machine);
        if !excluded.is_empty() {
            let names = foreign(&excluded.join(", "));
            text.push_str(&format!("\n{} is without disk {names}", record.id));
        }
    }
    for problem in &problems {
        text.push_str(&format!("\nproblem: {}", foreign(&problem.to_string())));
    }
    let list: Vec<Value> = records.iter().map(|record| to_json(record, &store)).collect();
    let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    context.print(json!({"checkpoints": list, "problems": problems}), &text);
    Ok(())
}

fn row(record: &Record) -> Vec<String> {
    vec![
        record.id.to_string(),
        foreign(&record.guest),
        foreign(record.tag.as_deref().unwrap_or("-")),
        ago(record.created_ms),
        ByteSize(record.memory.pages * PAGE_BYTES as u64).to_string(),
        ByteSize(record.summary.stored_bytes).to_string(),
        ByteSize(record.summary.inherited_bytes).to_string(),
        milliseconds(record.summary.pause_ms),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report;
    use dewar_image::{ImageId, Location, Store};
    use serde_json::Value;
    use std::fs;
    use std::path::Path;

    /// The places of all numbers and texts in a record.
    fn leaves(value: &Value, path: &str, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                map.iter().for_each(|(key, it)| leaves(it, &format!("{path}/{key}"), found))
            }
            Value::Array(all) => {
                all.iter()
                    .enumerate()
                    .for_each(|(at, it)| leaves(it, &format!("{path}/{at}"), found));
            }
            _ => found.push(path.to_owned()),
        }
    }

    /// Whatever a record says, with a checksum that fits: it is listed and drawn, or it is a
    /// problem, and the others are listed.
    #[test]
    fn no_record_keeps_a_list_or_a_report_from_being_made() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../image/tests/data/v1");
        let place = tempfile::tempdir().expect("tempdir");
        let mut copy = std::process::Command::new("cp");
        copy.arg("-r").arg(data).arg(place.path().join("s"));
        assert!(copy.status().expect("cp").success());
        let store = Store::open(&Location::Folder(place.path().join("s"))).expect("store");
        let id = store.ids().expect("ids").remove(0);
        let path = place.path().join(format!("s/images/{id}.json"));
        let whole: Value = serde_json::from_slice(&fs::read(&path).expect("read")).expect("JSON");
        let mut places = Vec::new();
        leaves(&whole["record"], "", &mut places);
        let other = ImageId("c0123456789ab".to_owned());
        let other_path = place.path().join(format!("s/images/{other}.json"));
        let values = [
            json!(u64::MAX),
            json!(-1),
            json!(1e308),
            json!(1e40),
            json!(0),
            json!(true),
            json!("\u{1b}]0;x\u{7}\n<b>"),
            json!("x".repeat(100_000)),
            json!([]),
            Value::Null,
        ];
        let mut listed = 0;
        for place in &places {
            for value in &values {
                let mut record = whole["record"].clone();
                record["id"] = json!(other);
                *record.pointer_mut(place).expect("a place") = value.clone();
                let body = record.to_string();
                let sum = blake3::hash(body.as_bytes()).to_hex().to_string();
                let text = format!(
                    r#"{{"format":"dewar-record","version":1,"blake3":"{sum}","record":{body}}}"#
                );
                fs::write(&other_path, text + "\n").expect("write");
                let (records, problems) = store.records().expect("records");
                assert_eq!(records.len() + problems.len(), 2, "{place}: {value}");
                assert!(records.iter().any(|it| it.id == id), "{place}: {value}");
                for record in &records {
                    let shown = row(record);
                    assert!(!shown.concat().contains('\u{1b}'), "{place}: {value}");
                    to_json(record, &store);
                    report::page(record, &records);
                }
                listed += usize::from(records.len() == 2);
            }
        }
        assert!(listed > 20, "only {listed} records of {} were readable", places.len());
    }
}
