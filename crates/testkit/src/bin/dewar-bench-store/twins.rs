//! Two guests from one image, booted and no more, in one store: what the second
//! one's checkpoint takes, by `--dedup`.

use crate::REPEATS;
use anyhow::{Context, Result};
use dewar_testkit::bench::median;
use dewar_testkit::{GuestSpec, Lab};
use serde_json::{Map, Value, json};
use std::path::Path;

pub fn measure(dewar: &Path) -> Result<Value> {
    println!("\ntwins: bytes stored for the second of two guests of 512 MiB, as booted");
    let lab = Lab::new(dewar)?;
    let spec = GuestSpec { memory_mib: 512, disks: Vec::new(), ..GuestSpec::default() };
    let _guests = [lab.run("one", &spec)?, lab.run("two", &spec)?];
    let mut results = Map::new();
    for dedup in ["off", "image", "store"] {
        let (mut bytes, mut times) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let mut ids = Vec::new();
            for name in ["one", "two"] {
                let line = ["checkpoint", name, "--full", "--dedup", dedup];
                let told = lab.dewar(&line).done().json();
                ids.push(told["checkpoint"].as_str().context("an id")?.to_owned());
                if name == "two" {
                    bytes.push(told["stored_bytes"].as_f64().context("bytes")?);
                    times.push(told["total_ms"].as_f64().context("a time")?);
                }
            }
            for id in ids {
                lab.dewar(&["delete", &id]).done();
            }
        }
        println!(
            "  --dedup {dedup:<5} {:6.1} MB in {:.0} ms",
            median(bytes.clone()) / 1e6,
            median(times.clone())
        );
        results.insert(dedup.to_owned(), json!({"bytes": bytes, "ms": times}));
    }
    Ok(Value::Object(results))
}
