//! In which QEMU a guest is whose stream was begun.

use super::under_way::Handover;
use crate::launch::kill;
use crate::qmp::{Qmp, QmpError};
use dewar_kernel::{Pid, ProcessHandle};
use dewar_registry::{GuestFolder, ProcessId};
use serde_json::json;
use std::time::{Duration, Instant};

/// How long the stream may take from its begin to RESUME. It is short; but a
/// host may be slow, and nothing is lost by waiting.
const ARRIVES_WITHIN: Duration = Duration::from_secs(60);
/// How long the new QEMU may be silent, while the guest stands still: who hangs is ended, and
/// the guest goes on in the old one.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);
/// How long a stopped process may take to stand still.
const HALTS_WITHIN: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_micros(500);
/// How long it is listened to, before it is asked: it has to load the guest's state. A
/// guest that stood still comes without a word.
const LISTENS: Duration = Duration::from_millis(3);
/// How often they are asked how far the stream is; they have to move the guest.
const ASK_BOTH_EVERY: Duration = Duration::from_millis(20);

/// In which QEMU the guest is.
pub(super) enum Outcome {
    /// In the new one; a connection to it, if it lives.
    Moved(Option<Qmp>),
    /// In the old one; the new one never ran it and is dead, or is to be ended.
    Stayed,
    /// Nobody knows.
    Unknown,
}

/// Waits until it is decided. `watched` is a connection to the new QEMU that was
/// there when the stream began; without it, what it said before is not known.
pub(super) fn outcome(
    handover: &Handover,
    folder: &GuestFolder,
    mut old: Option<&mut Qmp>,
    watched: Option<Qmp>,
) -> Outcome {
    let process = handover.new.filter(ProcessId::is_seen);
    let process = process.and_then(|new| ProcessHandle::open(Pid(new.pid)).ok());
    if watched.is_none() {
        // The command before us may have died between its last look and its decision.
        process.iter().for_each(ProcessHandle::go_on);
    }
    let mut knows = watched.is_some();
    let mut new = watched.or_else(|| handover.connect_new(folder));
    let deadline = Instant::now() + ARRIVES_WITHIN;
    let mut ask_both = Instant::now() + ASK_BOTH_EVERY;
    loop {
        if new.is_none() && handover.new.is_some_and(|new| new.is_alive()) {
            // It may be too busy to answer yet.
            new = handover.connect_new(folder);
            if new.is_none() && Instant::now() > deadline {
                return Outcome::Unknown;
            }
            std::thread::sleep(POLL);
            continue;
        }
        let Some(qmp) = &mut new else { break };
        if qmp.resumes_within(LISTENS) {
            return Outcome::Moved(new);
        }
        // Asked before the new one's status: a guest that stands still arrives
        // without RESUME, and what arrived in between must show there.
        let over = Instant::now() > ask_both && {
            ask_both = Instant::now() + ASK_BOTH_EVERY;
            let stream = old.as_deref_mut().map_or(Stream::UnderWay, stream);
            stream == Stream::Broken || has_loaded(qmp) || Instant::now() > deadline
        };
        match arrival(qmp, handover.was_running) {
            Ok(Arrival::Waiting) => knows = true,
            Ok(Arrival::Moved) => return Outcome::Moved(new),
            Ok(Arrival::Stalled) => {
                knows = true;
                break;
            }
            // It may be ending; what it said before is still to be read.
            Err(_) if qmp.has_resumed() => return Outcome::Moved(None),
            Err(_) => break,
        }
        if over {
            break;
        }
        std::thread::sleep(POLL);
    }
    // It is ended before anything is decided: it must not resume afterwards, nor between the
    // last look and its end.
    if let Some(process) = &process {
        process.halt(HALTS_WITHIN);
        if new.as_mut().is_some_and(Qmp::has_resumed) {
            process.go_on();
            return Outcome::Moved(new);
        }
    }
    if handover.new.is_some_and(|new| !kill(&new) && !new.is_seen()) {
        return Outcome::Unknown;
    }
    if new.as_mut().is_some_and(Qmp::has_resumed) {
        return Outcome::Moved(None);
    }
    if knows || !handover.old.is_alive() {
        return Outcome::Stayed;
    }
    // Without our eyes on it all the while, only the old one's word that the
    // stream lacks its end says that the guest never ran in the new one.
    match old.map(final_stream) {
        Some(Stream::Broken) => Outcome::Stayed,
        _ => Outcome::Unknown,
    }
}

enum Arrival {
    Waiting,
    Moved,
    /// Loaded, but it cannot run.
    Stalled,
}

/// How far the new QEMU is by its own word.
fn arrival(new: &mut Qmp, was_running: bool) -> Result<Arrival, QmpError> {
    let status = new.execute_within(ANSWERS_WITHIN, "query-status", json!({}))?;
    Ok(match status["status"].as_str() {
        Some("inmigrate") | None => Arrival::Waiting,
        // It was loaded, but something keeps it from running: its disks, say.
        Some("paused" | "prelaunch") if was_running && !new.has_resumed() => {
            match new.execute("cont", json!({})) {
                Ok(_) => Arrival::Moved,
                Err(_) => Arrival::Stalled,
            }
        }
        // It runs; or it stands still as it did before; or it ran and stopped.
        Some(_) => Arrival::Moved,
    })
}

/// Whether a QEMU that has not let the guest run has loaded all, or failed to: it
/// will not any more.
fn has_loaded(new: &mut Qmp) -> bool {
    let report = new.execute_within(ANSWERS_WITHIN, "query-migrate", json!({}));
    report.is_ok_and(|report| report["status"] == "completed" || report["status"] == "failed")
}

#[derive(PartialEq, Eq)]
enum Stream {
    UnderWay,
    /// The old QEMU sent all of it, and stands still.
    Complete,
    /// It never will.
    Broken,
}

/// How far the old QEMU is by its own word. What it says of an earlier migration
/// is told from this one by whether the guest runs.
fn stream(old: &mut Qmp) -> Stream {
    let mut ask = |command: &str| -> Result<String, QmpError> {
        let answer = old.execute(command, json!({}))?;
        Ok(answer["status"].as_str().unwrap_or("none").to_owned())
    };
    let (Ok(migration), Ok(guest)) = (ask("query-migrate"), ask("query-status")) else {
        // Perhaps it has just ended.
        return Stream::UnderWay;
    };
    match (migration.as_str(), guest.as_str()) {
        ("completed", "postmigrate" | "finish-migrate") => Stream::Complete,
        ("completed" | "none" | "failed" | "cancelled", _) => Stream::Broken,
        _ => Stream::UnderWay,
    }
}

/// The same when it sends to nobody any more: it will know soon.
fn final_stream(old: &mut Qmp) -> Stream {
    let deadline = Instant::now() + ARRIVES_WITHIN;
    loop {
        match stream(old) {
            Stream::UnderWay if Instant::now() < deadline => std::thread::sleep(POLL),
            other => return other,
        }
    }
}
