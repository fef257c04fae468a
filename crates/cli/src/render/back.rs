//! A guest that is back: its clock, and the ports that it forwarded.

use dewar_lifecycle::{Clock, Code, Failure};
use dewar_units::format_duration;
use serde_json::{Value, json};

/// How its clock is, for programs.
pub fn clock_json(clock: &Clock) -> Value {
    json!({
        "behind_ms": clock.behind.as_millis() as u64, "set": clock.set.is_ok(),
        "why_not": clock.set.as_ref().err(),
    })
}

/// The same for people: a line, where there is something to tell.
pub fn clock_line(clock: &Clock) -> String {
    match &clock.set {
        Ok(()) => String::new(),
        Err(why) => format!("\nits clock is {} behind: {why}", format_duration(clock.behind)),
    }
}

/// What was said against forwarded ports, a line each.
pub fn listed(unforwarded: &[String]) -> String {
    unforwarded.iter().map(|said| format!("\nnot forwarded: {said}")).collect()
}

/// That a guest that is back has all the ports that it had.
pub fn all_forwarded(name: &str, unforwarded: &[String]) -> Result<(), Failure> {
    if unforwarded.is_empty() {
        return Ok(());
    }
    let what = format!("not all ports of '{name}' could be forwarded again");
    Err(Failure::new(Code::Attention, what).state("the guest is back"))
}
