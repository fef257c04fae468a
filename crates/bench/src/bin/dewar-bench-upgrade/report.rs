//! Tables and the file of results.

use anyhow::Result;
use dewar_bench::median;
use serde_json::{Value, json};
use std::path::Path;

/// What repeated measurements of one way gave.
#[derive(Debug, Clone)]
pub struct Row {
    pub way: &'static str,
    pub mib: u64,
    pub guests: usize,
    pub gaps_ms: Vec<f64>,
    pub totals_ms: Vec<f64>,
    /// Answered and failed.
    pub requests: Option<(u64, u64)>,
}

impl Row {
    pub fn new(way: &'static str, mib: u64, guests: usize) -> Self {
        let (gaps_ms, totals_ms) = (Vec::new(), Vec::new());
        Self { way, mib, guests, gaps_ms, totals_ms, requests: None }
    }

    fn gap(&self) -> f64 {
        median(self.gaps_ms.clone())
    }

    fn total(&self) -> f64 {
        median(self.totals_ms.clone())
    }

    pub fn print(&self) {
        println!(
            "{:>5} MiB  {} guests  {:<32} gap {:>9.1} ms  total {:>9.1} ms",
            self.mib,
            self.guests,
            self.way,
            self.gap(),
            self.total()
        );
    }
}

pub fn save(path: &Path, rows: &[Row]) -> Result<()> {
    let rows: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "way": row.way, "memory_mib": row.mib, "guests": row.guests,
                "gap_ms": row.gap(), "total_ms": row.total(),
                "gaps_ms": row.gaps_ms, "totals_ms": row.totals_ms,
                "requests": row.requests.map(|(answered, failed)| {
                    json!({"answered": answered, "failed": failed})
                }),
            })
        })
        .collect();
    std::fs::write(path, serde_json::to_string_pretty(&json!({"rows": rows}))? + "\n")?;
    Ok(())
}

/// What the project set itself, and whether it is reached.
pub fn print_targets(rows: &[Row]) {
    let upgrades = || rows.iter().filter(|row| row.way == "dewar upgrade");
    let verdict = |name: &str, value: f64, most: f64| {
        let word = if value <= most { "reached" } else { "NOT reached" };
        println!("{name}: {value:.2} (at most {most}): {word}");
    };
    println!();
    if let Some(worst) = upgrades().map(Row::gap).reduce(f64::max) {
        verdict("longest gap of an upgrade, ms", worst, 50.0);
    }
    if let (Some(small), Some(large)) =
        (upgrades().min_by_key(|row| row.mib), upgrades().max_by_key(|row| row.mib))
    {
        verdict(
            "gap of the largest guest over that of the smallest",
            large.gap() / small.gap(),
            1.2,
        );
    }
    let all = || rows.iter().filter(|row| row.way == "dewar upgrade --all");
    if let (Some(one), Some(most)) =
        (all().find(|row| row.guests == 1), all().max_by_key(|row| row.guests))
    {
        verdict("time of all guests over that of one", most.total() / one.total(), 3.0);
    }
    if let Some((_, failed)) = rows.iter().find_map(|row| row.requests) {
        verdict("failed requests", failed as f64, 0.0);
    }
}
