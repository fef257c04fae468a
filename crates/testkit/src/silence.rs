//! What a test says of a guest that does not answer: whether its QEMU lives and
//! runs it, what its threads wait for, and how far its page server is.

use dewar_guest_qemu::Qmp;
use dewar_kernel::{Task, threads_of};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// How long threads are watched.
const WATCHED: Duration = Duration::from_millis(500);

/// What is known of the guest whose console this is, in a [`crate::Lab`].
pub(crate) fn describe(console: &Path) -> String {
    let lab = console.parent().and_then(|folder| Some((folder.parent()?, folder.file_name()?)));
    let Some((lab, name)) = lab else { return String::new() };
    let folder = lab.join("root/guests").join(name);
    let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap_or_default();
    let record: Value = serde_json::from_str(&read("guest.json")).unwrap_or_default();
    let status = Qmp::connect(&folder.join("qmp.sock"))
        .and_then(|mut qmp| qmp.execute("query-status", json!({})))
        .map_or_else(|error| error.to_string(), |status| status.to_string());
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let processes: String =
        ["process", "server"].map(|key| threads(key, record[key]["pid"].as_i64())).concat();
    format!(
        "phase {}, status {status}, page server's word {}, load {}\n{processes}",
        record["phase"],
        read("server.json").trim(),
        load.trim()
    )
}

fn threads(what: &str, pid: Option<i64>) -> String {
    let Some(pid) = pid.map(|pid| pid as i32) else { return format!("no {what}\n") };
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
    let stat = read("stat");
    let state = stat.rsplit_once(") ").map_or("-", |(_, rest)| &rest[..1]);
    let ran = task.ran().unwrap_or_default().saturating_sub(before);
    format!("  {} {state} waits in '{}', ran {ran:?} of {WATCHED:?}\n", read("comm"), read("wchan"))
}
