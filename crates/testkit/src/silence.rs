//! What a test says of a guest that does not answer: whether its QEMU lives and
//! runs it, what its threads wait for, and how far its page server is.

use crate::process::state;
use dewar_guest_qemu::Qmp;
use dewar_kernel::{Task, threads_of};
use dewar_registry::Registry;
use serde_json::json;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// How long threads are watched.
const WATCHED: Duration = Duration::from_millis(500);

/// What is known of the guest whose console this is, in a [`crate::Lab`].
pub(crate) fn describe(console: &Path) -> String {
    let lab = console.parent().and_then(|folder| Some((folder.parent()?, folder.file_name()?)));
    let Some((lab, name)) = lab else { return String::new() };
    let Ok(folder) = Registry::new(&lab.join("root")).guest(&name.to_string_lossy()) else {
        return String::new();
    };
    let record = match folder.record() {
        Ok(record) => record,
        Err(error) => return error.to_string(),
    };
    let status = Qmp::of(&record)
        .and_then(|mut qmp| qmp.execute("query-status", json!({})))
        .map_or_else(|error| error.to_string(), |status| status.to_string());
    let read = |file: &Path| fs::read_to_string(file).unwrap_or_default().trim().to_owned();
    format!(
        "phase {:?}, status {status}, page server's word {}, load {}\n{}{}",
        record.phase,
        read(&folder.file("server.json")),
        read(Path::new("/proc/loadavg")),
        threads("QEMU", Some(record.process.pid)),
        threads("page server", record.server.map(|server| server.pid)),
    )
}

fn threads(what: &str, pid: Option<i32>) -> String {
    let Some(pid) = pid else { return format!("no {what}\n") };
    let before: Vec<_> = threads_of(pid).into_iter().map(|task| (task, task.ran())).collect();
    std::thread::sleep(WATCHED);
    let lines = before.into_iter().map(|(task, ran)| thread(task, ran.unwrap_or_default()));
    format!("{what} {pid}:\n{}", lines.collect::<String>())
}

fn thread(task: Task, before: Duration) -> String {
    let read = |file: &str| {
        let path = format!("/proc/{}/task/{}/{file}", task.process, task.thread);
        fs::read_to_string(path).unwrap_or_default().trim().to_owned()
    };
    let state = state(task.thread).unwrap_or('-');
    let ran = task.ran().unwrap_or_default().saturating_sub(before);
    format!("  {} {state} waits in '{}', ran {ran:?} of {WATCHED:?}\n", read("comm"), read("wchan"))
}
