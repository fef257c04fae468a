//! `make bench-upgrade`: another QEMU under running guests, and guests without a
//! process for a while, beside stock QEMU's save and restore and beside a boot,
//! in the same run. Gaps are in the guest's heartbeat, timed from outside.
//!
//! usage: dewar-bench-upgrade DEWAR OUT.json [--repeats N] [--sizes MIB,...]
//!     [--guests N] [--parts WORD,...] [--ways WORD,...]

#![forbid(unsafe_code)]

mod many;
mod report;
mod subject;
mod web;

use anyhow::{Context, Result};
use dewar_bench::touch_free_memory;
use dewar_testkit::{next_qemu, qemu};
use report::Row;
use std::path::PathBuf;
use subject::{Subject, Way};

/// What is measured, and with what.
struct Plan {
    dewar: PathBuf,
    out: PathBuf,
    repeats: usize,
    sizes: Vec<u64>,
    guests: usize,
    parts: Vec<String>,
    /// How one guest is treated.
    ways: Vec<Way>,
    /// The two QEMUs between which guests move.
    qemus: [String; 2],
}

fn main() -> Result<()> {
    let plan = plan()?;
    touch_free_memory()?;
    println!("between {} and {}", plan.qemus[0], plan.qemus[1]);
    let mut rows = Vec::new();
    if plan.has("one") {
        for mib in &plan.sizes {
            rows.extend(one_guest(&plan, *mib)?);
            report::save(&plan.out, &rows)?;
        }
    }
    if plan.has("many") {
        rows.extend(many::measure(&plan)?);
        report::save(&plan.out, &rows)?;
    }
    if plan.has("web") {
        rows.extend(web::measure(&plan)?);
        report::save(&plan.out, &rows)?;
    }
    report::print_targets(&rows);
    println!("\nwritten to {}", plan.out.display());
    Ok(())
}

/// One idle guest of a size, each way in turn, repeated.
fn one_guest(plan: &Plan, mib: u64) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = plan.ways.iter().map(|way| Row::new(way.name(), mib, 1)).collect();
    for by_dewar in [true, false] {
        if !plan.ways.iter().any(|way| way.is_dewars() == by_dewar) {
            continue;
        }
        // One guest for all: it takes longer to fill its memory than to measure.
        let mut subject = Subject::start(plan, by_dewar, mib)?;
        for repeat in 0..plan.repeats {
            let ways = plan.ways.iter().zip(&mut rows);
            for (way, row) in ways.filter(|(way, _)| way.is_dewars() == by_dewar) {
                let figures = subject.measure(*way, &plan.qemus[(repeat + 1) % 2])?;
                row.gaps_ms.push(figures.gap_ms);
                row.totals_ms.push(figures.total_ms);
            }
        }
    }
    rows.iter().for_each(Row::print);
    Ok(rows)
}

impl Plan {
    fn has(&self, part: &str) -> bool {
        self.parts.iter().any(|it| it == part)
    }
}

fn plan() -> Result<Plan> {
    let mut words = std::env::args().skip(1);
    let usage = "usage: dewar-bench-upgrade DEWAR OUT.json [--repeats N] [--sizes MIB,..] [--guests N] [--parts one,many,web] [--ways upgrade,freeze,unchecked,save,boot]";
    let other = next_qemu().map_or_else(qemu, |program| program.display().to_string());
    let mut plan = Plan {
        dewar: std::fs::canonicalize(words.next().context(usage)?)?,
        out: words.next().context(usage)?.into(),
        repeats: 5,
        sizes: vec![256, 1024, 2048, 4096, 8192],
        guests: 6,
        parts: ["one", "many", "web"].map(str::to_owned).to_vec(),
        ways: Way::ALL.to_vec(),
        qemus: [qemu(), other],
    };
    while let Some(flag) = words.next() {
        let value = words.next().context(usage)?;
        match flag.as_str() {
            "--repeats" => plan.repeats = value.parse()?,
            "--sizes" => plan.sizes = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--guests" => plan.guests = value.parse()?,
            "--ways" => plan.ways = Way::named(&value).context(usage)?,
            "--parts" => plan.parts = value.split(',').map(str::to_owned).collect(),
            _ => anyhow::bail!(usage),
        }
    }
    Ok(plan)
}
