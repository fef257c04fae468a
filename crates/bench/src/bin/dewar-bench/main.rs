//! `make bench-checkpoint`: Dewar's checkpoint and restore beside stock QEMU's
//! ways to a file, in the same run, on the same kind of guest.
//!
//! usage: dewar-bench DEWAR OUT.json [--repeats N] [--sizes GIB,...] [--once GIB,...]
//!     [--rates N,...] [--methods WORD,...]

#![forbid(unsafe_code)]

mod measure;
mod methods;
mod report;

use anyhow::{Context, Result};
use dewar_bench::{reserved_mib, sample_file, touch_free_memory};
use dewar_testkit::{GuestSpec, Lab};
use measure::{Figures, Subject};
use methods::Method;
use report::Row;
use std::path::{Path, PathBuf};
use std::time::Duration;

struct Plan {
    dewar: PathBuf,
    out: PathBuf,
    repeats: usize,
    /// GiB, each with all rates and repeats.
    sizes: Vec<u64>,
    /// GiB, once each.
    once: Vec<u64>,
    rates: Vec<u64>,
    methods: Vec<Method>,
}

fn main() -> Result<()> {
    let plan = plan()?;
    touch_free_memory()?;
    let mut rows = Vec::new();
    let run_cost = run_cost(&plan)?;
    report::print_run_cost(&run_cost);
    for (sizes, repeats) in [(&plan.sizes, plan.repeats), (&plan.once, 1)] {
        for gib in sizes {
            for rate in &plan.rates {
                rows.extend(measure_load(&plan, *gib, *rate, repeats)?);
                report::save(&plan.out, &rows, &run_cost)?;
            }
        }
    }
    report::print_targets(&rows, &run_cost);
    println!("\nwritten to {}", plan.out.display());
    Ok(())
}

fn plan() -> Result<Plan> {
    let mut words = std::env::args().skip(1);
    let usage = "usage: dewar-bench DEWAR OUT.json [--repeats N] [--sizes GIB,..] [--once GIB,..] [--rates N,..] [--methods WORD,..]";
    let mut plan = Plan {
        dewar: std::fs::canonicalize(words.next().context(usage)?)?,
        out: words.next().context(usage)?.into(),
        repeats: 5,
        sizes: vec![1, 8],
        once: vec![2, 4],
        rates: vec![0, 20_000, 200_000],
        methods: Method::ALL.to_vec(),
    };
    let list = |text: String| -> Result<Vec<u64>> {
        text.split(',').filter(|word| !word.is_empty()).map(|word| Ok(word.parse()?)).collect()
    };
    while let Some(flag) = words.next() {
        let value = words.next().context(usage)?;
        match flag.as_str() {
            "--repeats" => plan.repeats = value.parse()?,
            "--sizes" => plan.sizes = list(value)?,
            "--once" => plan.once = list(value)?,
            "--rates" => plan.rates = list(value)?,
            "--methods" => {
                let words: Vec<&str> = value.split(',').collect();
                plan.methods.retain(|method| words.iter().any(|word| method.name().contains(word)));
            }
            _ => anyhow::bail!(usage),
        }
    }
    Ok(plan)
}

/// All methods, taking turns, on one guest under Dewar and one without.
fn measure_load(plan: &Plan, gib: u64, rate: u64, repeats: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    println!("\n{gib} GiB, {} ({repeats} repeats)", report::load(rate));
    let mut all: Vec<(Method, Vec<Figures>)> =
        plan.methods.iter().map(|method| (*method, Vec::new())).collect();
    // One guest at a time: two would not fit the machine's cores.
    for dewars in [true, false] {
        let mut left: Vec<_> =
            all.iter_mut().filter(|(method, _)| method.is_dewars() == dewars).collect();
        if left.is_empty() {
            continue;
        }
        let lab = Lab::new(&plan.dewar)?;
        let mut subject = boot(&lab, gib, dewars)?;
        subject.load(rate)?;
        for _ in 0..repeats {
            // One that fails is not tried again: the next try would fail too,
            // and some take minutes to.
            left.retain_mut(|(method, figures)| {
                methods::run(*method, &lab, &mut subject)
                    .map(|one| figures.push(one))
                    .inspect_err(|why| println!("  SKIPPED {}: {why:#}", method.name()))
                    .is_ok()
            });
        }
    }
    report::print_head();
    for (method, figures) in all.into_iter().filter(|(_, figures)| !figures.is_empty()) {
        let row = Row { gib, rate, method: method.name().to_owned(), figures };
        report::print_row(&row);
        rows.push(row);
    }
    Ok(rows)
}

fn boot(lab: &Lab, gib: u64, by_dewar: bool) -> Result<Subject> {
    let sample = sample_file(Path::new("target/bench"))?;
    let spec = GuestSpec {
        memory_mib: gib << 10,
        sample: Some(sample),
        beat_ms: 1,
        ..GuestSpec::measured()
    };
    let mut subject =
        if by_dewar { Subject::by_dewar(lab, &spec)? } else { Subject::by_hand(lab, &spec)? };
    // A quarter each: zeros, text, programs, noise.
    subject.guest.console.ask(&format!("fill {} mixed", (gib << 10) - reserved_mib(gib)))?;
    Ok(subject)
}

/// What `dewar run` costs a guest that is never checkpointed: steps a second
/// with it and without, taking turns.
fn run_cost(plan: &Plan) -> Result<Vec<(f64, f64)>> {
    let mut pairs = Vec::new();
    for _ in 0..plan.repeats {
        let mut speeds = [0.0; 2];
        for (by_dewar, speed) in [true, false].into_iter().zip(&mut speeds) {
            let lab = Lab::new(&plan.dewar)?;
            let spec = GuestSpec {
                memory_mib: 512,
                disks: Vec::new(),
                beat_ms: 1,
                ..GuestSpec::measured()
            };
            let mut subject = if by_dewar {
                Subject::by_dewar(&lab, &spec)?
            } else {
                Subject::by_hand(&lab, &spec)?
            };
            subject.guest.console.ask("check 40000 1 none hard")?;
            // Past the translation of its code and its first touches.
            std::thread::sleep(Duration::from_secs(2));
            *speed = subject.speed(Duration::from_secs(4))?;
        }
        pairs.push((speeds[0], speeds[1]));
    }
    Ok(pairs)
}
