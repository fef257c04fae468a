//! A guest of 4 GiB that wrote 1 % of its RAM: the bytes and the time of an
//! incremental checkpoint, beside a full one of the same guest.

use crate::REPEATS;
use anyhow::{Context, Result};
use dewar_bench::{median, reserved_mib, sample_file};
use dewar_testkit::{GuestSpec, Lab};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

const GIB: u64 = 4;
const PAGES: u64 = GIB << 18;

pub fn measure(dewar: &Path) -> Result<Value> {
    println!("incremental: {GIB} GiB, 1 % of RAM written in between ({REPEATS} repeats)");
    let lab = Lab::new(dewar)?;
    let sample = sample_file(Path::new("target/bench"))?;
    let spec = GuestSpec {
        memory_mib: GIB << 10,
        sample: Some(sample),
        beat_ms: 1,
        ..GuestSpec::measured()
    };
    let mut guest = lab.run("g", &spec)?;
    guest.console.ask(&format!("fill {} mixed", (GIB << 10) - reserved_mib(GIB)))?;
    let (mut bytes, mut times, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        let full = checkpoint(&lab, &["checkpoint", "g", "--full"])?;
        // Each page once, and a few twice.
        guest.console.ask(&format!("words {}", PAGES / 100))?;
        std::thread::sleep(Duration::from_secs(1));
        guest.console.ask("words 0")?;
        let more = checkpoint(&lab, &["checkpoint", "g"])?;
        bytes.push(more.bytes / full.bytes);
        times.push(more.ms / full.ms);
        shares.push(more.pages / PAGES as f64);
        println!(
            "  full {:.0} MB in {:.0} ms, then {:.0} pages: {:.1} MB in {:.0} ms, paused {:.1} ms",
            full.bytes / 1e6,
            full.ms,
            more.pages,
            more.bytes / 1e6,
            more.ms,
            more.pause_ms
        );
        for id in [full.id, more.id] {
            lab.dewar(&["delete", &id]).done();
        }
    }
    println!(
        "  bytes {:.4} of the full one's (to reach: 0.03), time {:.4} (to reach: 0.05), with {:.2} % of pages stored",
        median(bytes.clone()),
        median(times.clone()),
        median(shares.clone()) * 100.0
    );
    Ok(json!({"gib": GIB, "bytes": bytes, "time": times, "pages_stored": shares}))
}

struct Cost {
    id: String,
    bytes: f64,
    ms: f64,
    pages: f64,
    pause_ms: f64,
}

fn checkpoint(lab: &Lab, line: &[&str]) -> Result<Cost> {
    let report = lab.dewar(line).done().json();
    let number = |value: &Value| value.as_f64().context("a number");
    Ok(Cost {
        id: report["checkpoint"].as_str().context("an id")?.to_owned(),
        bytes: number(&report["stored_bytes"])?,
        ms: number(&report["total_ms"])?,
        pages: number(&report["pages"]["stored"])?,
        pause_ms: number(&report["pause_ms"])?,
    })
}
