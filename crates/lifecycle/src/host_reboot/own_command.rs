//! Runs `dewar` as a child, as a person would type it, and returns its JSON.

use crate::failure::{Code, Failure};
use crate::host::Host;
use serde_json::Value;
use std::ffi::OsStr;
use std::process::{Command, Stdio};

/// Runs one, and returns what it tells programs.
///
/// # Errors
/// What it failed with.
pub fn own_command(
    host: &Host,
    words: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Result<Value, Failure> {
    let run = || {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--json").arg("--root").arg(host.registry.root()).args(words);
        command.stdin(Stdio::null()).stderr(Stdio::null()).output()
    };
    let output = run().map_err(|error| Failure::new(Code::Failed, error.to_string()))?;
    let told: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    if output.status.success() {
        return Ok(told);
    }
    let text = |key: &str| told[key].as_str().map(str::to_owned);
    let what = text("error").unwrap_or_else(|| format!("it ended with {}", output.status));
    let failure = Failure::new(Code::Failed, what);
    let failure = match text("guest_state") {
        Some(state) => failure.state(state),
        None => failure,
    };
    Err(match text("advice") {
        Some(advice) => failure.advice(advice),
        None => failure,
    })
}
