//! `make bench-migrate`: a running guest moved to another host over a link of a given speed, beside QEMU's
//! own ways over the same link, in the same run. Gaps are in the guest's heartbeat, timed from outside.
//!
//! usage: dewar-bench-migrate DEWAR OUT.json [--repeats N] [--sizes MIB,...] [--load words|colour] [--rates N,...]
//!     [--links MBIT,...] [--fills MIX,...] [--methods WORD,...]

#![forbid(unsafe_code)]

mod by_dewar;
mod by_qemu;
mod subject;

use anyhow::{Context, Result};
use by_dewar::{ByDewar, Way};
use by_qemu::{ByQemu, Method};
use dewar_bench::{median, touch_free_memory};
use serde_json::json;
use std::path::{Path, PathBuf};
use subject::{Figures, Load};

/// What is measured, and with what.
struct Plan {
    dewar: PathBuf,
    out: PathBuf,
    repeats: usize,
    sizes: Vec<u64>,
    load: Load,
    rates: Vec<u64>,
    links: Vec<f64>,
    fills: Vec<String>,
    methods: Vec<String>,
}

/// What repeated measurements of one way gave.
struct Row {
    method: String,
    of: Case,
    figures: Vec<Option<Figures>>,
}

/// What is moved over what.
#[derive(Clone)]
struct Case {
    mib: u64,
    fill: String,
    load: Load,
    rate: u64,
    mbit: f64,
}

fn main() -> Result<()> {
    let plan = plan()?;
    touch_free_memory()?;
    let mut rows = Vec::new();
    for mib in &plan.sizes {
        for fill in &plan.fills {
            measure(&plan, *mib, fill, &mut rows)?;
        }
    }
    println!("\nwritten to {}", plan.out.display());
    Ok(())
}

/// Measures all ways with guests of one kind. They stay for all links and loads: it takes longer to fill
/// their memory than to measure.
fn measure(plan: &Plan, mib: u64, fill: &str, rows: &mut Vec<Row>) -> Result<()> {
    let ways: Vec<Way> = Way::ALL.into_iter().filter(|it| plan.has(it.word())).collect();
    let methods: Vec<Method> = Method::ALL.into_iter().filter(|it| plan.has(it.word())).collect();
    let start_dewar = || ByDewar::start(&plan.dewar, mib, fill);
    let mut dewar = (!ways.is_empty()).then(start_dewar).transpose()?;
    let start_qemu = || ByQemu::start(&plan.dewar, mib, fill);
    let mut qemu = (!methods.is_empty()).then(start_qemu).transpose()?;
    for mbit in &plan.links {
        for rate in &plan.rates {
            let (load, rate) = (plan.load, *rate);
            let of = Case { mib, fill: fill.to_owned(), load, rate, mbit: *mbit };
            for way in &ways {
                let Some(dewar) = &mut dewar else { continue };
                let figures = repeated(plan.repeats, || dewar.measure(*way, *mbit, (load, rate)))?;
                rows.push(Row::new(way.name(), of.clone(), figures));
            }
            for method in &methods {
                let Some(qemu) = &mut qemu else { continue };
                let figures =
                    repeated(plan.repeats, || qemu.measure(*method, *mbit, (load, rate)))?;
                rows.push(Row::new(method.name(), of.clone(), figures));
            }
            save(&plan.out, rows)?;
        }
    }
    Ok(())
}

/// What does not end once is not tried again.
fn repeated(
    times: usize,
    mut once: impl FnMut() -> Result<Option<Figures>>,
) -> Result<Vec<Option<Figures>>> {
    let mut all = Vec::new();
    while all.len() < times && !matches!(all.last(), Some(None)) {
        all.push(once()?);
    }
    Ok(all)
}

impl Row {
    /// One that is printed at once.
    fn new(method: &str, of: Case, figures: Vec<Option<Figures>>) -> Self {
        let row = Self { method: method.to_owned(), of, figures };
        let Case { mib, fill, load, rate, mbit } = &row.of;
        let load = load.unit();
        print!("{mib:>5} MiB {fill:<6} {rate:>7} {load} {mbit:>6} Mb/s  {method:<20} ");
        match row.figures.contains(&None) {
            true => println!("does not end"),
            false => println!(
                "total {:>7.2} s  gap {:>7.1} ms  sent {:>6.0} MB",
                row.median(|it| it.total_s),
                row.median(|it| it.gap_ms),
                row.median(|it| it.bytes / 1e6),
            ),
        }
        row
    }

    fn median(&self, of: impl Fn(&Figures) -> f64) -> f64 {
        median(self.figures.iter().flatten().map(of).collect())
    }
}

fn save(out: &Path, rows: &[Row]) -> Result<()> {
    let figures =
        |it: &Figures| json!({"total_s": it.total_s, "gap_ms": it.gap_ms, "bytes": it.bytes});
    let rows: Vec<_> = rows
        .iter()
        .filter(|row| !row.figures.contains(&None))
        .map(|row| {
            json!({
                "method": row.method, "memory_mib": row.of.mib, "fill": row.of.fill,
                "load": format!("{} {}", row.of.rate, row.of.load.unit()), "link": format!("{} Mb/s", row.of.mbit),
                "repeats": row.figures.iter().flatten().map(figures).collect::<Vec<_>>(),
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
    let usage = "usage: dewar-bench-migrate DEWAR OUT.json [--repeats N] [--sizes MIB,..] [--load words|colour] [--rates N,..] [--links MBIT,..] \
                 [--fills mixed,zeros,equal,noise] [--methods dewar,dewar-300ms,dewar-postcopy,dewar-cores,dewar-gpu,plain,xbzrle,\
                 multifd,multifd-zstd,postcopy]";
    let mut plan = Plan {
        dewar: std::fs::canonicalize(words.next().context(usage)?)?,
        out: words.next().context(usage)?.into(),
        repeats: 5,
        sizes: vec![1024],
        load: Load::Words,
        rates: vec![0, 20_000],
        links: vec![1000.0],
        fills: vec!["mixed".to_owned()],
        methods: Way::USUAL
            .map(Way::word)
            .into_iter()
            .chain(Method::ALL.map(Method::word))
            .map(str::to_owned)
            .collect(),
    };
    while let Some(flag) = words.next() {
        let value = words.next().context(usage)?;
        match flag.as_str() {
            "--repeats" => plan.repeats = value.parse()?,
            "--sizes" => plan.sizes = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--load" => plan.load = Load::named(&value).context(usage)?,
            "--rates" => plan.rates = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--links" => plan.links = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--fills" => plan.fills = value.split(',').map(str::to_owned).collect(),
            "--methods" => plan.methods = value.split(',').map(str::to_owned).collect(),
            _ => anyhow::bail!(usage),
        }
    }
    Ok(plan)
}
