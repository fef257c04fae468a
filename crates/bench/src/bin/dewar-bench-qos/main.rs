//! `make bench-qos`: the experiment of the paper on Co-SEDF, in a guest and as a
//! plain process: so many MD5 hashes a second, of a block that grows, beside programs
//! that take all CPU time that they can get.
//!
//! usage: dewar-bench-qos DEWAR OUT.json [--subjects process,guest]
//!     [--loads ramp,steps,film,quiet,checkpoints,own] [--ways dewar,...] [--repeats N] [--hogs N]

#![forbid(unsafe_code)]

mod checkpoints;
mod curve;
mod load;
mod one_group;
mod oracle;
mod outside;
mod picture;
mod report;
mod run;
mod summary;
mod table;
mod targets;
mod way;

use anyhow::{Context, Result};
use checkpoints::Checkpoints;
use dewar_testkit::{Hogs, Lab};
use load::{Load, LoadKind};
use one_group::OneGroup;
use report::Row;
use run::{Bench, SubjectKind};
use std::path::PathBuf;
use way::Way;

struct Plan {
    dewar: PathBuf,
    out: PathBuf,
    subjects: Vec<SubjectKind>,
    loads: Vec<LoadKind>,
    /// Of a load's ways those with these names, or all.
    ways: Option<Vec<String>>,
    repeats: usize,
    hogs: usize,
}

impl Plan {
    fn has(&self, way: &Way) -> bool {
        self.ways.as_ref().is_none_or(|ways| ways.contains(&way.name()))
    }
}

fn main() -> Result<()> {
    let plan = plan()?;
    let _one_group = OneGroup::hold();
    let mut rows: Vec<Row> = Vec::new();
    for subject in &plan.subjects {
        let lab = Lab::new(&plan.dewar)?;
        let mut bench = Bench::new(&lab, *subject)?;
        let (name, cost) = (subject.name(), bench.cost());
        println!("{name}: 1 MB takes {:.2} ms, a job {:.2} more", cost.ms_per_mb, cost.ms_beside);
        // A process is not checkpointed by us.
        let has = |kind: &&LoadKind| **kind != LoadKind::Own || *subject == SubjectKind::Guest;
        for kind in plan.loads.iter().filter(has) {
            let load = Load::new(*kind, bench.cost());
            let hogs = Hogs::start(if kind.has_hogs() { plan.hogs } else { 0 })?;
            let checkpoints = match kind {
                LoadKind::Checkpoints => Some(Checkpoints::of_another(&lab)?),
                LoadKind::Own => Some(Checkpoints::of(&lab, "g")?),
                _ => None,
            };
            let ahead = [(); 2].map(|()| bench.measure(&load, &Way::Ahead, &hogs));
            let ahead = ahead.into_iter().collect::<Result<Vec<Row>>>()?;
            for _ in 0..plan.repeats {
                for way in Way::all(*kind).into_iter().filter(|way| plan.has(way)) {
                    let row = bench.measure(&load, &way, &hogs)?;
                    row.print();
                    rows.push(row);
                }
            }
            if let Some(checkpoints) = &checkpoints {
                println!("{} checkpoints were taken meanwhile", checkpoints.count()?);
            }
            drop((hogs, checkpoints));
            report::add_oracles(&mut rows, &ahead);
            report::save(&plan.out, &rows)?;
            let name = format!("qos-{}-{}", subject.name(), kind.name());
            let picture = plan.out.with_file_name(format!("{name}.svg"));
            std::fs::write(&picture, picture::draw(&rows, *subject, *kind))?;
            if *kind == LoadKind::Film {
                let curve = plan.out.with_file_name(format!("{name}-curve.svg"));
                std::fs::write(curve, curve::draw(&rows, *subject, *kind))?;
            }
            table::print(&rows, *subject, *kind);
            println!("\ndrawn in {}", picture.display());
        }
    }
    targets::print(&rows);
    println!("\nwritten to {}", plan.out.display());
    Ok(())
}

fn plan() -> Result<Plan> {
    let usage = "usage: dewar-bench-qos DEWAR OUT.json [--subjects process,guest] [--loads ramp,steps,film,quiet,checkpoints,own] [--ways NAME,...] [--repeats N] [--hogs N]";
    let mut words = std::env::args().skip(1);
    let mut plan = Plan {
        dewar: std::fs::canonicalize(words.next().context(usage)?)?,
        out: words.next().context(usage)?.into(),
        subjects: SubjectKind::ALL.to_vec(),
        loads: LoadKind::ALL.to_vec(),
        ways: None,
        repeats: 1,
        hogs: 6,
    };
    while let Some(flag) = words.next() {
        let value = words.next().context(usage)?;
        let list = || value.split(',');
        match flag.as_str() {
            "--subjects" => {
                plan.subjects = SubjectKind::ALL
                    .into_iter()
                    .filter(|it| list().any(|w| w == it.name()))
                    .collect();
            }
            "--loads" => {
                plan.loads =
                    LoadKind::ALL.into_iter().filter(|it| list().any(|w| w == it.name())).collect();
            }
            "--ways" => plan.ways = Some(list().map(str::to_owned).collect()),
            "--repeats" => plan.repeats = value.parse()?,
            "--hogs" => plan.hogs = value.parse()?,
            _ => anyhow::bail!(usage),
        }
    }
    Ok(plan)
}
