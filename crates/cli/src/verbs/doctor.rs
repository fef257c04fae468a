//! `doctor`: what this host can do, and what is missing.

mod checks;
mod finding;
mod kvm;

use crate::args::DoctorArgs;
use crate::context::Context;
use crate::output::table;
use crate::verbs::qos::stray_line;
use checks::{ended, look};
use dewar_lifecycle::{Code, Failure, container};
use finding::Finding;
use serde_json::json;

pub use checks::require_tracking;

pub fn run(context: &Context, args: DoctorArgs) -> Result<(), Failure> {
    if let Some(name) = &args.container {
        return of_container(context, name);
    }
    let mut findings = look(context);
    let unheld = context.qos_ledger().unheld();
    if !unheld.is_empty() {
        findings.push(Finding {
            name: "reservations",
            needed_for: "other programs that need the CPU",
            result: Err(unheld.iter().map(stray_line).collect::<Vec<_>>().join("; ")),
            required: false,
        });
    }
    if let Some(result) = ended(context) {
        findings.push(Finding {
            name: "ended guests",
            needed_for: "'dewar restore' brings them back",
            result,
            required: false,
        });
    }
    let list: Vec<_> = findings
        .iter()
        .map(|it| {
            json!({
                "name": it.name, "ok": it.result.is_ok(), "needed_for": it.needed_for,
                "required": it.required,
                "detail": it.result.as_ref().unwrap_or_else(|why| why),
            })
        })
        .collect();
    let rows = findings.iter().map(|it| {
        let (mark, detail) = match &it.result {
            Ok(detail) => ("ok", detail),
            Err(detail) if it.required => ("missing", detail),
            Err(detail) => ("-", detail),
        };
        vec![it.name.to_owned(), mark.to_owned(), detail.clone(), it.needed_for.to_owned()]
    });
    let able = findings.iter().all(|it| it.result.is_ok() || !it.required);
    let text = table(&["what", "", "found", "needed for"], rows.collect());
    let lacking = "this host lacks something that is required";
    let end = if able { Ok(()) } else { Err(Failure::new(Code::Unsupported, lacking)) };
    context.print_with(json!({"able": able, "findings": list}), &text, end)
}

/// What keeps a container from being saved, and what copies of its memory will be made only while it stands still.
fn of_container(context: &Context, name: &str) -> Result<(), Failure> {
    let guest = context.lock(name)?;
    guest.require_alive()?;
    let missing = container::preconditions(&guest.record)?.missing;
    let text = match missing.is_empty() {
        true => format!("{name} can be saved"),
        false => format!("{name} cannot be saved:\n  {}", missing.join("\n  ")),
    };
    let end = match missing.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(Code::Unsupported, format!("'{name}' cannot be saved as it is"))
            .state("it was not touched")),
    };
    context.print_with(
        json!({"name": name, "able": missing.is_empty(), "missing": missing}),
        &text,
        end,
    )
}
