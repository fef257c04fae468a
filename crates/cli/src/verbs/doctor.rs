//! `doctor`: what this host can do, and what is missing.

mod checks;
mod finding;
mod kvm;

use crate::context::Context;
use crate::output::table;
use crate::verbs::qos::stray_line;
use checks::{ended, look};
use dewar_lifecycle::{Code, Failure};
use finding::Finding;
use serde_json::json;

pub use checks::require_tracking;

pub fn run(context: &Context) -> Result<(), Failure> {
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
