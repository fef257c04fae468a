//! Every reservation, and what is left to promise.

use crate::args::QosArgs;
use crate::context::Context;
use crate::failure::{Code, Failure};
use crate::output::{percent, table};
use dewar_kernel::Task;
use dewar_qos::{BY_WEIGHT, Entry, Ledger, QosError, limit_of};
use serde_json::{Value, json};
use std::io::Write;
use std::time::Duration;

pub fn run(context: &Context, ledger: &Ledger, args: &QosArgs) -> Result<(), Failure> {
    loop {
        let mut entries = ledger.entries();
        let limit = limit_of(&entries);
        // The sum of nothing is minus zero.
        let by_deadline = entries.iter().filter(|entry| entry.by != BY_WEIGHT);
        let promised = by_deadline.map(|entry| entry.promise.most()).sum::<f64>().abs();
        if let Some(name) = &args.name {
            entries.retain(|entry| entry.name == *name);
            if entries.is_empty() {
                let what = format!("'{name}' has no reservation");
                return Err(Failure::new(Code::NotFound, what));
            }
        }
        let unreadable = ledger.unreadable();
        for path in &unreadable {
            eprintln!("dewar: {}", QosError::Unreadable(path.clone()));
        }
        let unheld = ledger.unheld();
        let stray = |task: &Task| {
            let how = task.scheduling().ok()?.reservation?;
            Some(json!({
                "pid": task.process, "thread": task.thread,
                "runtime_us": how.runtime.as_micros() as u64,
                "period_us": how.period.as_micros() as u64,
            }))
        };
        let headroom = (limit - promised).max(0.0);
        let told = json!({
            "reservations": entries.iter().map(told).collect::<Vec<_>>(),
            "limit_cpus": limit, "promised_cpus": promised, "headroom_cpus": headroom,
            "unreadable": unreadable, "unheld": unheld.iter().filter_map(stray).collect::<Vec<_>>(),
        });
        if args.watch {
            // Home, and clear what is below: our own, so not by way of what is escaped.
            let _ = write!(std::io::stdout(), "\x1b[H\x1b[J");
        }
        let mut text = format!(
            "{}\n{} of a CPU can be promised, {} are, {} are left",
            rows(&entries),
            percent(limit),
            percent(promised),
            percent(headroom)
        );
        for task in &unheld {
            text.push_str(&format!("\n{}", stray_line(task)));
        }
        if !context.print(told, &text) || !args.watch {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs(1));
        ledger.settle();
    }
}

/// What is said of a thread under a reservation that nobody holds.
pub fn stray_line(task: &Task) -> String {
    format!(
        "thread {} of process {} is under SCHED_DEADLINE and no 'dewar qos' holds it; if nobody else \
         does: 'dewar qos --release --pid {}'",
        task.thread, task.process, task.process
    )
}

/// An entry, for programs.
pub fn told(entry: &Entry) -> Value {
    let (seen, promise) = (&entry.seen, &entry.promise);
    json!({
        "name": entry.name, "pid": entry.process.pid, "controller": entry.controller.pid,
        "law": entry.law, "by": entry.by, "target_per_s": promise.rate,
        "miss": promise.miss, "min": promise.min, "max": promise.max, "threads": promise.threads,
        "reserved_cpus": seen.reserved, "used_cpus": seen.used,
        "demand_cpus": seen.demand,
        "headroom_cpus": (promise.most() - seen.reserved).max(0.0),
        "jobs": seen.jobs, "missed": seen.missed,
        "recent_jobs": seen.recent.0, "recent_missed": seen.recent.1,
        "rescued": seen.rescued, "refused": seen.refused, "ignored": seen.ignored,
        "heard": seen.heard,
    })
}

fn rows(entries: &[Entry]) -> String {
    let headings = [
        "name",
        ">target",
        ">reserved",
        ">used",
        ">demand",
        ">max",
        ">jobs",
        ">missed",
        ">last second",
        "by",
        "law",
    ];
    let row = |entry: &Entry| {
        let (seen, promise) = (&entry.seen, &entry.promise);
        let recent = match seen.heard {
            true => format!("{} of {}", seen.recent.1, seen.recent.0),
            false => "silent".to_owned(),
        };
        vec![
            entry.name.clone(),
            format!("{}/s", promise.rate),
            percent(seen.reserved),
            percent(seen.used),
            percent(seen.demand),
            percent(promise.most()),
            seen.jobs.to_string(),
            format!("{} ({})", seen.missed, percent(seen.missed as f64 / seen.jobs.max(1) as f64)),
            recent,
            entry.by.clone(),
            entry.law.clone(),
        ]
    };
    table(&headings, entries.iter().map(row).collect())
}
