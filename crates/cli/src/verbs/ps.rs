use crate::context::{Context, Settled, trouble};
use crate::failure::Failure;
use crate::output::table;
use crate::server::ServerState;
use dewar_guest_qemu::launch::last_words;
use dewar_guest_qemu::{Qmp, RunState};
use dewar_kernel::free;
use dewar_registry::{GuestFolder, GuestRecord, Phase};
use dewar_units::ByteSize;
use serde_json::{Value, json};

/// Less than this is no room.
const FULL: u64 = 1 << 20;

pub fn run(context: &Context) -> Result<(), Failure> {
    let Settled { mut failures, busy } = context.settle_all()?;
    let mut guests = Vec::new();
    let mut rows = Vec::new();
    for name in context.registry.names()? {
        let Ok(folder) = context.registry.guest(&name) else { continue };
        // Who was at work on it a moment ago may have died since, and left it as it was then.
        let is_busy = busy.contains(&name)
            && context.hold(&name).is_err_and(|failure| {
                let is_busy = !failure.is_attention();
                failures.extend((!is_busy).then_some(failure));
                is_busy
            });
        let Ok(record) = folder.record() else { continue };
        let state = if is_busy { "busy".to_owned() } else { state(&folder, &record) };
        let trouble = trouble(&folder);
        let why = why_ended(&folder, &record).filter(|_| state == "ended");
        let bytes: u64 = record.ram.iter().map(|file| file.bytes).sum();
        let pid = record.process.is_alive().then_some(record.process.pid);
        guests.push(json!({
            "name": name, "pid": pid, "state": state, "memory_bytes": bytes,
            "adopted": record.adopted, "lazy_restore": lazy(&folder, &record),
            "not_handed_over": record.not_handed_over, "trouble": trouble,
            "ended_because": why,
        }));
        let pid = pid.map_or("-".to_owned(), |pid| pid.to_string());
        rows.push(vec![
            name,
            pid,
            match &trouble {
                Some(_) => format!("{state}, needs attention: 'dewar inspect {}'", record.name),
                None => match &why {
                    Some(why) => format!("{state}: {why}"),
                    None => described(&folder, &record, &state),
                },
            },
            ByteSize(bytes).to_string(),
        ]);
    }
    let text = if rows.is_empty() {
        "no guests; 'dewar run NAME -- qemu-system-x86_64 ...' starts one".to_owned()
    } else {
        table(&["name", ">pid", "state", ">memory"], rows)
    };
    context.print(json!({"guests": guests}), &text);
    failures.into_iter().next().map_or(Ok(()), |failure| Err(failure.already_printed()))
}

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
    if !record.process.is_alive() && record.phase != Phase::Frozen {
        return "ended".to_owned();
    }
    // Who holds the lock is talking to QEMU.
    let Ok(_lock) = folder.lock() else { return "busy".to_owned() };
    if record.phase == Phase::Frozen {
        return "frozen".to_owned();
    }
    if record.phase == Phase::Restoring {
        return "unfinished".to_owned();
    }
    let state = Qmp::of(record).and_then(|mut qmp| RunState::of(&mut qmp));
    state.map_or_else(|_| "silent".to_owned(), |state| state.to_string())
}

/// The state and, while pages are still to come, how far they are.
fn described(folder: &GuestFolder, record: &GuestRecord, state: &str) -> String {
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
            format!("{state}, page server gone: 'dewar restore {}' goes on", record.name)
        }
    }
}

fn lazy(folder: &GuestFolder, record: &GuestRecord) -> Value {
    let server = ServerState::of(folder, record);
    if record.server.is_none() {
        return Value::Null;
    }
    json!({
        "complete": server.complete, "pages_arrived": server.arrived, "pages": server.of,
        "pages_reused": server.reused,
        "problem": server.problem, "server_alive": server_alive(record),
    })
}

pub fn server_alive(record: &GuestRecord) -> bool {
    // One that somebody stopped serves nobody.
    record.server.is_some_and(|server| server.is_alive() && !server.is_halted())
}
