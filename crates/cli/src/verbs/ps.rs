use crate::context::Context;
use crate::output::table;
use crate::progress::Progress;
use crate::render::guest::{described, lazy, state, why_ended};
use dewar_lifecycle::container_process::memory_bytes;
use dewar_lifecycle::host_reboot::{self, Note, since_reboot};
use dewar_lifecycle::{Failure, Recovered, trouble};
use dewar_units::ByteSize;
use serde_json::json;

pub fn run(context: &Context) -> Result<(), Failure> {
    let recovered = host_reboot::recover(context, &Progress::new("looking at the guests"));
    let Recovered { mut failures, busy } = context.recover_all()?;
    let note = recovered.and_then(|more| {
        failures.extend(more);
        Note::load(context)
    });
    // A note that cannot be read is no reason to say nothing of the guests.
    let note = note.unwrap_or_else(|failure| {
        failures.push(failure);
        None
    });
    let mut guests = Vec::new();
    let mut rows = Vec::new();
    for name in context.registry.names()? {
        let Ok(folder) = context.registry.guest(&name) else { continue };
        // A command that was at work on it a moment ago may have died since, and left it as it was then.
        let is_busy = busy.contains(&name)
            && context.lock(&name).is_err_and(|failure| {
                let is_busy = !failure.is_attention();
                failures.extend((!is_busy).then_some(failure));
                is_busy
            });
        let Ok(record) = folder.record() else { continue };
        let state = if is_busy { "busy".to_owned() } else { state(&folder, &record) };
        let trouble = trouble(&folder);
        let kept = note.as_ref().and_then(|note| since_reboot(note, &record));
        let outage = kept.as_ref().and_then(|(_, outage)| *outage);
        let why = why_ended(&folder, &record).filter(|_| state == "ended");
        let bytes = memory_bytes(&record);
        let pid = record.process.is_alive().then_some(record.process.pid);
        guests.push(json!({
            "name": name, "pid": pid, "state": state, "memory_bytes": bytes,
            "adopted": record.adopted, "lazy_restore": lazy(&folder, &record),
            "not_handed_over": record.not_handed_over, "trouble": trouble,
            "ended_because": why, "host_reboot_outage_ms": outage.map(|it| it.as_millis() as u64),
        }));
        let pid = pid.map_or("-".to_owned(), |pid| pid.to_string());
        rows.push(vec![
            name,
            pid,
            match &trouble {
                Some(_) => format!("{state}, needs attention: 'dewar inspect {}'", record.name),
                None => match &why {
                    Some(why) => format!("{state}: {why}"),
                    None => match kept {
                        Some((kept, _)) => {
                            format!("{}; {kept}", described(&folder, &record, &state))
                        }
                        None => described(&folder, &record, &state),
                    },
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
