//! `make bench-tlc`: TLC's experiment. A guest runs HPC Challenge; while it is in
//! a section of it a checkpoint is taken, onto a slow disk, the guest is ended
//! and brought back, and goes on to the next section. By Dewar, by Dewar with a
//! dirty store in Redis, for what is written meanwhile or for a part of the rest, too,
//! and by QEMU's stop-and-save.
//!
//! usage: dewar-bench-tlc DEWAR OUT.json [--memory MIB] [--sections NAME,...]
//!     [--speed MB/S] [--epoch TIME] [--after SECONDS] [--methods NAME,...]

#![forbid(unsafe_code)]

mod method;
mod picture;
mod table;

use anyhow::{Context, Result, ensure};
use dewar_testkit::{Lab, RedisServer, SlowDisk};
use method::{Dewar, Method, Qemu};
use std::path::PathBuf;
use std::time::Duration;

/// What is compared.
const METHODS: [&str; 4] =
    ["dewar", "dewar --dirty-store", "dewar --spread 2G", "qemu stop-and-save"];

/// What to do.
#[derive(Debug)]
pub struct Plan {
    methods: Vec<String>,
    dewar: PathBuf,
    out: PathBuf,
    memory_mib: u64,
    /// Of HPC Challenge, in the order in which it comes to them.
    sections: Vec<String>,
    /// Bytes a second to and from the disk.
    speed: u64,
    epoch: String,
    /// How long a section has run when its checkpoint is taken.
    after: Duration,
}

fn main() -> Result<()> {
    let plan = plan()?;
    let mut columns = Vec::new();
    for name in METHODS.into_iter().filter(|name| plan.methods.iter().any(|it| it == name)) {
        let server = RedisServer::start(&["--save", ""])?;
        let url = server.url();
        let lab = Lab::new(&plan.dewar)?;
        let disk = SlowDisk::new(lab.path(), 24, plan.speed)?;
        let mut method: Box<dyn Method> = match name {
            "qemu stop-and-save" => Box::new(Qemu::boot(&lab, &plan, disk.path())?),
            "dewar" => Box::new(Dewar::boot(&lab, &plan, disk.path(), &[])?),
            _ => {
                let mut more = vec!["--dirty-store", &url, "--epoch", &plan.epoch];
                more.extend(
                    name.strip_prefix("dewar --spread")
                        .map(|size| ["--spread", size.trim()])
                        .into_iter()
                        .flatten(),
                );
                Box::new(Dewar::boot(&lab, &plan, disk.path(), &more)?)
            }
        };
        for section in &plan.sections {
            method.wait_for_section(section)?;
            std::thread::sleep(plan.after);
            let figures = method.checkpoint_and_return()?;
            println!("{name}, {section}: {figures:?}");
            columns.push(table::Column { method: name, section: section.clone(), figures });
            table::save(&plan, &columns)?;
        }
        drop(method);
    }
    table::print(&columns);
    let picture = plan.out.with_extension("svg");
    std::fs::write(&picture, picture::draw(&plan.sections, &columns))?;
    println!("\nwritten to {} and {}", plan.out.display(), picture.display());
    Ok(())
}

fn plan() -> Result<Plan> {
    let usage = "usage: dewar-bench-tlc DEWAR OUT.json [--memory MIB] [--sections NAME,..] [--speed MB/S] [--epoch TIME] [--after SECONDS] [--methods NAME,..]";
    let mut words = std::env::args().skip(1);
    let sections = ["MPIRandomAccess", "PTRANS", "StarDGEMM"];
    let mut plan = Plan {
        methods: METHODS.map(str::to_owned).to_vec(),
        dewar: std::fs::canonicalize(words.next().context(usage)?)?,
        out: words.next().context(usage)?.into(),
        memory_mib: 1024,
        sections: sections.map(str::to_owned).to_vec(),
        speed: 25_000_000,
        epoch: "1s".to_owned(),
        after: Duration::from_secs(10),
    };
    while let Some(flag) = words.next() {
        let value = words.next().context(usage)?;
        match flag.as_str() {
            "--memory" => plan.memory_mib = value.parse()?,
            "--sections" => plan.sections = value.split(',').map(str::to_owned).collect(),
            "--methods" => plan.methods = value.split(',').map(str::to_owned).collect(),
            "--speed" => plan.speed = value.parse::<u64>()? * 1_000_000,
            "--epoch" => plan.epoch = value,
            "--after" => plan.after = Duration::from_secs(value.parse()?),
            _ => anyhow::bail!(usage),
        }
    }
    let is_known = |name: &String| METHODS.contains(&name.as_str());
    ensure!(!plan.sections.is_empty() && plan.methods.iter().all(is_known), usage);
    Ok(plan)
}
