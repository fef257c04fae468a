//! Every reservation, and what is left to promise.

use crate::args::QosArgs;
use crate::context::Context;
use crate::output::percent;
use crate::render::qos::{rows, to_json};
use dewar_kernel::Task;
use dewar_lifecycle::{Code, Failure};
use dewar_qos::{BY_WEIGHT, Ledger, QosError, limit_of};
use serde_json::json;
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
        let report = json!({
            "reservations": entries.iter().map(to_json).collect::<Vec<_>>(),
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
        if !context.print(report, &text) || !args.watch {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs(1));
        ledger.recover();
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
