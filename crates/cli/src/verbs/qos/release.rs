//! `qos --release`.

use crate::context::Context;
use crate::render::qos::sum;
use dewar_kernel::Scheduling;
use dewar_lifecycle::qos::{BETWEEN, background::ask_to_end};
use dewar_lifecycle::{Code, Failure};
use dewar_qos::{Ledger, QosError};
use serde_json::json;

/// Ends the controller of a guest and waits until its threads are given back.
pub fn guest(context: &Context, ledger: &Ledger, name: &str) -> Result<(), Failure> {
    let entry = ledger.entry(name).ok_or_else(|| {
        Failure::new(Code::NotFound, format!("'{name}' has no reservation"))
            .advice("'dewar qos --status' lists them")
    })?;
    ask_to_end(entry.controller);
    if !entry.controller.ends_within(BETWEEN) {
        let what = format!("process {} does not end", entry.controller.pid);
        return Err(Failure::new(Code::Failed, what).state("the reservation holds"));
    }
    ledger.recover();
    context.print(
        json!({"name": name, "released": true}),
        &format!("{name}: {}; its threads are as they were", sum(&entry)),
    );
    Ok(())
}

/// Makes threads ordinary ones that are under a reservation which no controller holds.
pub fn process(context: &Context, ledger: &Ledger, pid: i32) -> Result<(), Failure> {
    let mut tasks = ledger.unheld();
    tasks.retain(|task| task.process == pid);
    if tasks.is_empty() {
        let holder = ledger.entries().into_iter().find(|entry| entry.process.pid == pid);
        let what = format!("process {pid} has no thread under a reservation that nobody holds");
        let failure = Failure::new(Code::NotFound, what);
        return Err(match holder {
            Some(entry) => failure.advice(format!("'dewar qos {} --release' ends it", entry.name)),
            None => failure.advice("'dewar qos --status' lists them"),
        });
    }
    for task in &tasks {
        task.schedule(Scheduling::ordinary(0)).map_err(QosError::from)?;
    }
    let threads: Vec<i32> = tasks.iter().map(|task| task.thread).collect();
    context.print(
        json!({"pid": pid, "released": true, "threads": threads}),
        &format!("{} threads of process {pid} are ordinary ones now", threads.len()),
    );
    Ok(())
}
