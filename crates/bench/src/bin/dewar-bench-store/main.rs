//! `make bench-store`: what an incremental checkpoint costs beside a full one,
//! how fast pages go into and out of stores beside plain writes and
//! `redis-benchmark`, and how `ls`, `gc` and `verify` grow with a store.
//!
//! usage: dewar-bench-store DEWAR OUT.json [incremental] [twins] [throughput] [growth]

#![forbid(unsafe_code)]

mod growth;
mod incremental;
mod throughput;
mod twins;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::path::PathBuf;

/// How often everything is measured; medians are told.
const REPEATS: usize = 5;

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let usage =
        "usage: dewar-bench-store DEWAR OUT.json [incremental] [twins] [throughput] [growth]";
    let dewar = std::fs::canonicalize(words.next().context(usage)?)?;
    let out: PathBuf = words.next().context(usage)?.into();
    let wanted: Vec<String> = words.collect();
    let all = wanted.is_empty();
    let wants = |name: &str| all || wanted.iter().any(|word| word == name);
    dewar_bench::touch_free_memory()?;
    let mut results = json!({"repeats": REPEATS});
    let mut keep = |name: &str, value: Value| -> Result<()> {
        results[name] = value;
        Ok(std::fs::write(&out, format!("{results:#}\n"))?)
    };
    if wants("incremental") {
        keep("incremental", incremental::measure(&dewar)?)?;
    }
    if wants("twins") {
        keep("twins", twins::measure(&dewar)?)?;
    }
    if wants("throughput") {
        keep("throughput", throughput::measure()?)?;
    }
    if wants("growth") {
        keep("growth", growth::measure(&dewar)?)?;
    }
    println!("\nwritten to {}", out.display());
    Ok(())
}
