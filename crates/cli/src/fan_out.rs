//! Every guest, a few at a time: a process each, as if each had been asked for
//! by its name.

use crate::context::Context;
use crate::output::note;
use dewar_lifecycle::text::foreign;
use dewar_lifecycle::{Code, Failure};
use dewar_registry::GuestRecord;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

const ATTENTION: u8 = Code::Attention as u8;

/// How one guest fared.
struct Fared {
    code: u8,
    answer: Value,
}

/// A verb for every guest.
pub struct Each<'e> {
    /// Its name.
    pub verb: &'e str,
    /// What it does, and has done, for people.
    pub doing: &'e str,
    pub done: &'e str,
    /// What is told of a guest when it is done, from its result.
    pub end: &'e (dyn Fn(&Value) -> String + Sync),
}

impl Each<'_> {
    /// Does it with every virtual machine of which `concerned` holds, `jobs` at a time.
    pub fn of(
        &self,
        context: &Context,
        concerned: impl Fn(&GuestRecord) -> bool,
        jobs: usize,
        more: &[OsString],
    ) -> Result<(), Failure> {
        let unfinished = context.recover_all()?.failures;
        let is_concerned = |name: &String| {
            let record = context.registry.guest(name).and_then(|folder| folder.record());
            record.is_ok_and(|record| record.container.is_none() && concerned(&record))
        };
        let names: Vec<String> =
            context.registry.names()?.into_iter().filter(is_concerned).collect();
        let lines = MultiProgress::new();
        let fared = each(&names, jobs, |name| {
            let line = lines.add(ProgressBar::new_spinner());
            line.set_style(style());
            line.set_message(format!("{name}: {}", self.doing));
            line.enable_steady_tick(Duration::from_millis(100));
            let fared = self.one(context, name, more);
            let end = match fared.code {
                0 => (self.end)(&fared.answer),
                _ => foreign(fared.answer["error"].as_str().unwrap_or("it failed")),
            };
            line.finish_with_message(format!("{name}: {end}"));
            fared
        });
        self.report(context, &names, &fared)?;
        // Of guests that were not asked for.
        unfinished.iter().for_each(note);
        Ok(())
    }

    fn report(&self, context: &Context, names: &[String], fared: &[Fared]) -> Result<(), Failure> {
        let failed = || names.iter().zip(fared).filter(|(_, fared)| fared.code != 0);
        let done = fared.len() - failed().count();
        let guests: Vec<Value> = names
            .iter()
            .zip(fared)
            .map(|(name, it)| json!({"name": name, "exit_code": it.code, "result": it.answer}))
            .collect();
        let mut text = format!("{done} of {} guests {}", names.len(), self.done);
        for (name, fared) in failed() {
            text.push_str(&format!("\n{name}: {}", said(fared)));
        }
        context.print(json!({"guests": guests, "done": done}), &text);
        let unsupported = Code::Unsupported as u8;
        let code = match failed().map(|(_, fared)| fared.code).max() {
            None => return Ok(()),
            Some(ATTENTION) => Code::Attention,
            Some(_) if failed().all(|(_, fared)| fared.code == unsupported) => Code::Unsupported,
            Some(_) => Code::Failed,
        };
        let or_not_all = if code == Code::Attention { ", or not as they should be" } else { "" };
        let (failed, all) = (names.len() - done, names.len());
        let what = format!("{failed} of {all} guests were not {}{or_not_all}", self.done);
        Err(Failure::new(code, what).already_printed())
    }

    fn one(&self, context: &Context, name: &str, more: &[OsString]) -> Fared {
        let run = || -> std::io::Result<(u8, Value)> {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("--json").arg("--root").arg(context.registry.root());
            command.args([self.verb, name]).args(more);
            let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output()?;
            let code = output.status.code().and_then(|code| u8::try_from(code).ok());
            // Of one that was killed, or came to a bad end, nobody knows how it left the guest.
            let code = code.filter(|code| *code < ATTENTION).unwrap_or(ATTENTION);
            Ok((code, serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)))
        };
        match run() {
            Ok((code, answer)) => Fared { code, answer },
            Err(error) => Fared { code: 1, answer: json!({"error": error.to_string()}) },
        }
    }
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
