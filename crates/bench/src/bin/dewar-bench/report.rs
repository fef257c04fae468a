//! Tables, JSON, and what was reached.

use crate::measure::Figures;
use anyhow::Result;
use dewar_bench::median;
use serde_json::{Value, json};
use std::path::Path;

/// All repeats of one method under one load.
pub struct Row {
    pub gib: u64,
    pub rate: u64,
    pub method: String,
    pub figures: Vec<Figures>,
}

impl Row {
    fn median(&self, figure: impl Fn(&Figures) -> f64) -> f64 {
        median(self.figures.iter().map(figure).collect())
    }

    fn median_of_some(&self, figure: impl Fn(&Figures) -> Option<f64>) -> Option<f64> {
        let known: Vec<f64> = self.figures.iter().filter_map(figure).collect();
        (!known.is_empty()).then(|| median(known))
    }
}

pub fn load(rate: u64) -> String {
    if rate == 0 { "idle".to_owned() } else { format!("{rate} pages/s") }
}

pub fn print_head() {
    println!(
        "  {:<26}{:>9}{:>9}{:>9}{:>12}{:>10}{:>8}{:>11}{:>11}",
        "", "pause", "(told)", "total", "writes lost", "stored", "CPU", "first beat", "full speed"
    );
}

pub fn print_row(row: &Row) {
    let optional = |value: Option<f64>| value.map_or("-".to_owned(), |ms| format!("{ms:.0} ms"));
    println!(
        "  {:<26}{:>6.1} ms{:>6.1} ms{:>7.2} s{:>12.0}{:>6.0} MiB{:>6.2} s{:>11}{:>11}",
        row.method,
        row.median(|it| it.pause_ms),
        row.median(|it| it.own_pause_ms),
        row.median(|it| it.total_s),
        row.median(|it| it.writes_lost),
        row.median(|it| it.stored_bytes) / f64::from(1 << 20),
        row.median(|it| it.cpu_s),
        optional(row.median_of_some(|it| it.first_beat_ms)),
        optional(row.median_of_some(|it| it.full_speed_ms)),
    );
}

pub fn print_run_cost(pairs: &[(f64, f64)]) {
    println!(
        "'dewar run' alone: {:.0} steps/s with it, {:.0} without: ratio {:.3} (medians of {})",
        median(pairs.iter().map(|pair| pair.0).collect()),
        median(pairs.iter().map(|pair| pair.1).collect()),
        median(pairs.iter().map(|pair| pair.0 / pair.1).collect()),
        pairs.len()
    );
}

pub fn save(out: &Path, rows: &[Row], run_cost: &[(f64, f64)]) -> Result<()> {
    let figures = |row: &Row| -> Vec<Value> {
        row.figures
            .iter()
            .map(|it| {
                json!({
                    "pause_ms": it.pause_ms, "own_pause_ms": it.own_pause_ms,
                    "gap_ms": it.gap_ms, "gap_at_ms": it.gap_at_ms,
                    "quiet_ms": it.quiet_ms, "away_ms": it.away_ms, "stages": it.stages,
                    "total_s": it.total_s, "writes_lost": it.writes_lost,
                    "stored_bytes": it.stored_bytes, "cpu_s": it.cpu_s,
                    "first_beat_ms": it.first_beat_ms, "full_speed_ms": it.full_speed_ms,
                })
            })
            .collect()
    };
    let rows: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "gib": row.gib, "pages_per_second": row.rate, "method": row.method,
                "repeats": figures(row),
            })
        })
        .collect();
    let text = serde_json::to_string_pretty(&json!({"run_cost": run_cost, "rows": rows}))?;
    Ok(std::fs::write(out, text + "\n")?)
}

/// Each target, and how far each load is from it.
pub fn print_targets(rows: &[Row], run_cost: &[(f64, f64)]) {
    println!("\nTargets:");
    let of = |row: &Row, method: &str| {
        rows.iter().find(|it| (it.gib, it.rate) == (row.gib, row.rate) && it.method == method)
    };
    let report = |holds: bool| if holds { "reached" } else { "NOT reached" };
    let live = [
        "qemu migrate-to-file",
        "qemu background-snapshot",
        "qemu exec:zstd -1 -T0",
        "qemu mapped-ram+multifd",
    ];
    for row in rows.iter().filter(|row| row.method == "dewar") {
        println!("  {} GiB, {}:", row.gib, load(row.rate));
        let pause = row.median(|it| it.pause_ms);
        println!("    pause {pause:.1} ms, at most 25: {}", report(pause <= 25.0));
        if let Some(peer) = of(row, "qemu background-snapshot").filter(|_| row.rate == 200_000) {
            let (ours, theirs) =
                (row.median(|it| it.writes_lost), peer.median(|it| it.writes_lost));
            let ratio = ours / theirs;
            println!(
                "    page-writes lost {ratio:.2} of background-snapshot's, at most 0.5: {}",
                report(ratio <= 0.5)
            );
        }
        let fastest = live
            .iter()
            .filter_map(|name| of(row, name))
            .map(|it| it.median(|it| it.total_s))
            .fold(f64::INFINITY, f64::min);
        if fastest.is_finite() {
            let ratio = row.median(|it| it.total_s) / fastest;
            println!(
                "    total time {ratio:.2} of QEMU's fastest live way, at most 0.9: {}",
                report(ratio <= 0.9)
            );
        }
        if let Some(peer) = of(row, "qemu migrate-to-file") {
            let ratio = row.median(|it| it.stored_bytes) / peer.median(|it| it.stored_bytes);
            println!("    bytes stored {ratio:.2} of QEMU's, at most 1: {}", report(ratio <= 1.0));
        }
        if let Some(peer) = of(row, "qemu exec:zstd -1 -T0") {
            let ratio = row.median(|it| it.stored_bytes) / peer.median(|it| it.stored_bytes);
            println!(
                "    bytes stored {ratio:.2} of zstd -1's, at most 1.1: {}",
                report(ratio <= 1.1)
            );
        }
        if let Some(first) = row.median_of_some(|it| it.first_beat_ms) {
            println!(
                "    restore to first heartbeat {first:.0} ms, at most 300: {}",
                report(first <= 300.0)
            );
        }
    }
    let ratio = median(run_cost.iter().map(|pair| pair.0 / pair.1).collect());
    println!("  'dewar run' alone: ratio {ratio:.3}, at least 0.98: {}", report(ratio >= 0.98));
}
