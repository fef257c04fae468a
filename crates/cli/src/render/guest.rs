//! How a guest is, in words.

use dewar_guest_qemu::launch::last_words;
use dewar_guest_qemu::{Qmp, RunState};
use dewar_kernel::free;
use dewar_lifecycle::container_process;
use dewar_lifecycle::page_server::{ServerState, server_alive, what_brings_the_rest};
use dewar_registry::{GuestFolder, GuestRecord, Phase};
use serde_json::{Value, json};

/// Less than this is no room.
const FULL: u64 = 1 << 20;

/// Why a guest's process ended, as far as that can be told afterwards.
pub fn why_ended(folder: &GuestFolder, record: &GuestRecord) -> Option<String> {
    let ram = record.owned_ram.iter().find(|path| path.exists())?;
    let place = ram.parent()?;
    if free(place)
        .is_ok_and(|free| free.file_system < FULL || free.memory.is_some_and(|it| it < FULL))
    {
        let what = "there is no room left for its memory, and QEMU is killed when it needs more";
        return Some(format!("{}: {what}", place.display()));
    }
    let said = last_words(&folder.file("console.log"))?;
    let last = said.rsplit("; ").find(|it| it.contains("qemu") && !it.contains("warning"))?;
    Some(format!("QEMU said: {last}"))
}

/// One word for how a guest is.
pub fn state(folder: &GuestFolder, record: &GuestRecord) -> String {
    let has_none = [Phase::Frozen, Phase::Leaving, Phase::Arriving];
    if !record.process.is_alive() && !has_none.contains(&record.phase) {
        return "ended".to_owned();
    }
    // The command that holds the lock is talking to QEMU.
    let Ok(_lock) = folder.lock() else { return "busy".to_owned() };
    match record.phase {
        Phase::Frozen => return "frozen".to_owned(),
        Phase::Leaving => return "given away".to_owned(),
        Phase::Arriving => return "arriving".to_owned(),
        Phase::Running | Phase::Restoring => {}
    }
    if record.phase == Phase::Restoring {
        return "unfinished".to_owned();
    }
    if let Some(state) = container_process::state(record) {
        return state;
    }
    let state = Qmp::of(record).and_then(|mut qmp| RunState::of(&mut qmp));
    state.map_or_else(|_| "silent".to_owned(), |state| state.to_string())
}

/// The state and, while pages are still to come, how far they are.
pub fn described(folder: &GuestFolder, record: &GuestRecord, state: &str) -> String {
    let server = ServerState::of(folder, record);
    if state == "ended" {
        return state.to_owned();
    }
    if server.complete {
        return match record.not_handed_over.is_empty() || state == "frozen" {
            true => state.to_owned(),
            false => format!("{state}, not all was handed over: 'dewar inspect {}'", record.name),
        };
    }
    let percent = 100 * server.arrived / server.of.max(1);
    match (server.problem, server_alive(record)) {
        (Some(problem), _) => format!("{state}, memory {percent} %: {problem}"),
        (None, true) => format!("{state}, memory {percent} %"),
        (None, false) => {
            format!("{state}, page server gone: {}", what_brings_the_rest(record))
        }
    }
}

/// How far a lazy restore is, for programs.
pub fn lazy(folder: &GuestFolder, record: &GuestRecord) -> Value {
    let server = ServerState::of(folder, record);
    if record.server.is_none() {
        return Value::Null;
    }
    let alive = server_alive(record);
    // A server that has brought all reads the checkpoint until it ends: who waits for
    // "complete" may delete that next.
    json!({
        "complete": server.complete && !alive, "pages_arrived": server.arrived, "pages": server.of,
        "pages_reused": server.reused,
        "problem": server.problem, "server_alive": alive,
    })
}
