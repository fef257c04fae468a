//! Every guest, a few at a time: a process each, as if each had been asked for
//! by its name.

use crate::args::UpgradeArgs;
use crate::context::Context;
use crate::failure::{Code, Failure};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

/// How one guest fared.
struct Fared {
    code: u8,
    answer: Value,
}

pub fn upgrade_all(context: &Context, args: &UpgradeArgs) -> Result<(), Failure> {
    let unfinished = context.settle_all();
    let running = |name: &String| {
        let record = context.registry.guest(name).and_then(|folder| folder.record());
        record.is_ok_and(|record| record.process.is_alive())
    };
    let names: Vec<String> = context.registry.names().into_iter().filter(running).collect();
    let lines = MultiProgress::new();
    let fared = each(&names, usize::from(args.jobs), |name| {
        let line = lines.add(ProgressBar::new_spinner());
        line.set_style(style());
        line.set_message(format!("{name}: upgrading"));
        line.enable_steady_tick(Duration::from_millis(100));
        let fared = upgrade_one(context, args, name);
        let end = match fared.code {
            0 => format!("now QEMU {}", fared.answer["qemu"].as_str().unwrap_or("?")),
            _ => fared.answer["error"].as_str().unwrap_or("it failed").to_owned(),
        };
        line.finish_with_message(format!("{name}: {end}"));
        fared
    });
    let failed: Vec<&Fared> = fared.iter().filter(|fared| fared.code != 0).collect();
    let done = fared.len() - failed.len();
    let guests: Vec<Value> = names
        .iter()
        .zip(&fared)
        .map(|(name, fared)| json!({"name": name, "exit_code": fared.code, "result": fared.answer}))
        .collect();
    let mut text = format!("{done} of {} guests upgraded", names.len());
    for (name, fared) in names.iter().zip(&fared).filter(|(_, fared)| fared.code != 0) {
        text.push_str(&format!("\n{name}: {}", said(fared)));
    }
    context.print(json!({"guests": guests, "upgraded": done}), &text);
    if let Some(failure) = unfinished.into_iter().next() {
        return Err(failure);
    }
    let Some(worst) = failed.iter().max_by_key(|fared| fared.code) else { return Ok(()) };
    let code = match worst.code {
        4 => Code::Unsupported,
        5 => Code::Attention,
        _ => Code::Failed,
    };
    let what = format!("{} of {} guests were not upgraded", failed.len(), names.len());
    Err(Failure::new(code, what).already_printed())
}

/// Runs `work` for each name, at most `jobs` at a time; results in order.
fn each<T: Send>(names: &[String], jobs: usize, work: impl Fn(&str) -> T + Sync) -> Vec<T> {
    let next = Mutex::new(0);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs.min(names.len()) {
            scope.spawn(|| {
                loop {
                    let index = {
                        let mut next = next.lock().unwrap_or_else(|locked| locked.into_inner());
                        *next += 1;
                        *next - 1
                    };
                    let Some(name) = names.get(index) else { return };
                    let result = work(name);
                    let mut results = results.lock().unwrap_or_else(|locked| locked.into_inner());
                    results.push((index, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(|locked| locked.into_inner());
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

fn upgrade_one(context: &Context, args: &UpgradeArgs, name: &str) -> Fared {
    let run = || -> std::io::Result<(u8, Value)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--json").arg("--root").arg(context.registry.root());
        command.args(["upgrade", name]);
        command.args(args.yes.then_some("--yes"));
        if let Some(program) = &args.qemu {
            command.arg("--qemu").arg(program);
        }
        let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output()?;
        let code = output.status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
        Ok((code, serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)))
    };
    match run() {
        Ok((code, answer)) => Fared { code, answer },
        Err(error) => Fared { code: 1, answer: json!({"error": error.to_string()}) },
    }
}

/// What a failed one said.
fn said(fared: &Fared) -> String {
    let parts = ["error", "guest_state", "advice"];
    let parts: Vec<&str> = parts.iter().filter_map(|key| fared.answer[key].as_str()).collect();
    parts.join("; ")
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {msg} {elapsed}")
        .unwrap_or_else(|_| ProgressStyle::default_spinner())
}
