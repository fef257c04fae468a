//! `make bench-migrate`: a running guest moved to another host over a link of a given speed, beside QEMU's
//! own ways over the same link, in the same run. Gaps are in the guest's heartbeat, timed from outside.
//!
//! usage: dewar-bench-migrate DEWAR OUT.json [--repeats N] [--sizes MIB,...] [--rates N,...]
//!     [--links MBIT,...] [--methods WORD,...]

#![forbid(unsafe_code)]

mod by_dewar;
mod by_qemu;
mod subject;

use anyhow::{Context, Result};
use by_dewar::ByDewar;
use by_qemu::{ByQemu, Method};
use dewar_testkit::bench::{median, touch_free_memory};
use serde_json::json;
use std::path::{Path, PathBuf};
use subject::Figures;

/// What is measured, and with what.
struct Plan {
    dewar: PathBuf,
    out: PathBuf,
    repeats: usize,
    sizes: Vec<u64>,
    rates: Vec<u64>,
    links: Vec<f64>,
    methods: Vec<String>,
}

/// What repeated measurements of one way gave.
struct Row {
    method: String,
    mib: u64,
    rate: u64,
    mbit: f64,
    figures: Vec<Figures>,
}

fn main() -> Result<()> {
    let plan = plan()?;
    touch_free_memory()?;
    let mut rows = Vec::new();
    for mib in &plan.sizes {
        // The guests stay for all links and loads: it takes longer to fill their memory than to measure.
        let mut dewar = plan.has("dewar").then(|| ByDewar::start(&plan.dewar, *mib)).transpose()?;
        let methods: Vec<Method> =
            Method::ALL.into_iter().filter(|it| plan.has(it.word())).collect();
        let mut qemu =
            (!methods.is_empty()).then(|| ByQemu::start(&plan.dewar, *mib)).transpose()?;
        for mbit in &plan.links {
            for rate in &plan.rates {
                if let Some(dewar) = &mut dewar {
                    let figures = repeated(plan.repeats, || dewar.measure(*mbit, *rate))?;
                    rows.push(Row::new("dewar", *mib, *rate, *mbit, figures));
                }
                for method in &methods {
                    let Some(qemu) = &mut qemu else { continue };
                    let figures = repeated(plan.repeats, || qemu.measure(*method, *mbit, *rate))?;
                    rows.push(Row::new(method.name(), *mib, *rate, *mbit, figures));
                }
                save(&plan.out, &rows)?;
            }
        }
    }
    println!("\nwritten to {}", plan.out.display());
    Ok(())
}

fn repeated(times: usize, mut once: impl FnMut() -> Result<Figures>) -> Result<Vec<Figures>> {
    (0..times).map(|_| once()).collect()
}

impl Row {
    /// One that is printed at once.
    fn new(method: &str, mib: u64, rate: u64, mbit: f64, figures: Vec<Figures>) -> Self {
        let row = Self { method: method.to_owned(), mib, rate, mbit, figures };
        println!(
            "{mib:>5} MiB {rate:>7} words/s {mbit:>6} Mb/s  {method:<22} total {:>7.2} s  gap {:>7.1} ms  \
             sent {:>6.0} MB",
            row.median(|it| it.total_s),
            row.median(|it| it.gap_ms),
            row.median(|it| it.bytes / 1e6),
        );
        row
    }

    fn median(&self, of: impl Fn(&Figures) -> f64) -> f64 {
        median(self.figures.iter().map(of).collect())
    }
}

fn save(out: &Path, rows: &[Row]) -> Result<()> {
    let figures =
        |it: &Figures| json!({"total_s": it.total_s, "gap_ms": it.gap_ms, "bytes": it.bytes});
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            json!({
                "method": row.method, "memory_mib": row.mib, "load": format!("{} words/s", row.rate),
                "link": format!("{} Mb/s", row.mbit),
                "repeats": row.figures.iter().map(figures).collect::<Vec<_>>(),
            })
        })
        .collect();
    Ok(std::fs::write(out, serde_json::to_string_pretty(&json!({"rows": rows}))? + "\n")?)
}

impl Plan {
    fn has(&self, method: &str) -> bool {
        self.methods.iter().any(|it| it == method)
    }
}

fn plan() -> Result<Plan> {
    let mut words = std::env::args().skip(1);
    let usage = "usage: dewar-bench-migrate DEWAR OUT.json [--repeats N] [--sizes MIB,..] [--rates N,..] [--links MBIT,..] [--methods dewar,plain,xbzrle,multifd,multifd-zstd]";
    let mut plan = Plan {
        dewar: std::fs::canonicalize(words.next().context(usage)?)?,
        out: words.next().context(usage)?.into(),
        repeats: 5,
        sizes: vec![1024],
        rates: vec![0, 20_000],
        links: vec![1000.0],
        methods: ["dewar", "plain", "xbzrle", "multifd", "multifd-zstd"]
            .map(str::to_owned)
            .to_vec(),
    };
    while let Some(flag) = words.next() {
        let value = words.next().context(usage)?;
        match flag.as_str() {
            "--repeats" => plan.repeats = value.parse()?,
            "--sizes" => plan.sizes = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--rates" => plan.rates = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--links" => plan.links = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--methods" => plan.methods = value.split(',').map(str::to_owned).collect(),
            _ => anyhow::bail!(usage),
        }
    }
    Ok(plan)
}
