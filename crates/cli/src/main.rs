//! `dewar`: keeps running machines warm.
//!
//! One file a verb under `verbs`; each turns its flags into calls of the
//! crates below and renders what comes back.
#![forbid(unsafe_code)]

mod args;
mod clock;
mod context;
mod deferred_free;
mod failure;
mod frozen_state;
mod guardian;
mod output;
mod own_session;
mod progress;
mod ram_dir;
mod replace_journal;
mod report;
mod server;
mod tracking;
mod verbs;

use args::{Cli, Verb};
use clap::Parser;
use context::Context;
use failure::Failure;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.json;
    dewar_kernel::heed_children();
    if matches!(cli.verb, Verb::Checkpoint(_) | Verb::Upgrade(_) | Verb::Freeze(_)) {
        // Where it is refused all is as it always was.
        let _ = dewar_kernel::run_on();
    }
    if matches!(cli.verb, Verb::Checkpoint(_)) {
        if let Some(code) = own_session::run_as_child(json) {
            return code;
        }
    }
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(json),
    }
}

fn run(cli: Cli) -> Result<(), Failure> {
    let context = Context::new(&cli.root, cli.json);
    match cli.verb {
        Verb::Run(args) => verbs::run::run(&context, args),
        Verb::Adopt(args) => verbs::adopt::run(&context, args),
        Verb::Ps => verbs::ps::run(&context),
        Verb::Inspect(args) => verbs::inspect::run(&context, args),
        Verb::Stop(args) => verbs::stop::run(&context, args),
        Verb::Rm(args) => verbs::rm::run(&context, args),
        Verb::Checkpoint(args) => verbs::checkpoint::run(&context, args),
        Verb::Upgrade(args) => verbs::upgrade::run(&context, args),
        Verb::Freeze(args) => verbs::freeze::run(&context, args),
        Verb::Thaw(args) => verbs::thaw::run(&context, args),
        Verb::Qos(args) => verbs::qos::run(&context, args),
        Verb::Ls(args) => verbs::ls::run(&context, args),
        Verb::Restore(args) => verbs::restore::run(&context, args),
        Verb::Verify(args) => verbs::verify::run(&context, args),
        Verb::Delete(args) => verbs::delete::run(&context, args),
        Verb::Gc(args) => verbs::gc::run(&context, args),
        Verb::Diff(args) => verbs::diff::run(&context, args),
        Verb::Report(args) => verbs::report::run(&context, args),
        Verb::Doctor => verbs::doctor::run(&context),
        Verb::Completions(args) => verbs::manual::completions(args),
        Verb::Man(args) => verbs::manual::man(args),
        Verb::Guardian(args) => guardian::watch(&context, args),
        Verb::QosWatchdog(args) => verbs::qos::keep(&context, args),
        Verb::Serve(args) => server::serve(&context, args),
    }
}
