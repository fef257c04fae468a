//! `dewar`: keeps running machines warm.
//!
//! One file a verb under `verbs`; each turns its flags into calls of the
//! crates below and renders what comes back.
#![forbid(unsafe_code)]

mod args;
mod context;
mod fan_out;
mod output;
mod progress;
mod render;
mod report;
mod verbs;

use args::{Cli, Verb};
use clap::Parser;
use context::Context;
use dewar_lifecycle::container::run_if_started_as_another;
use dewar_lifecycle::own_session::{AsChild, run_as_child};
use dewar_lifecycle::page_server::{Source, serve};
use dewar_lifecycle::{Code, Failure, guardian, host_reboot, qos, served_disks};
use progress::Progress;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = run_if_started_as_another() {
        return code;
    }
    let cli = Cli::parse();
    let json = cli.json;
    dewar_kernel::heed_children();
    if matches!(
        cli.verb,
        Verb::Checkpoint(_)
            | Verb::Upgrade(_)
            | Verb::Freeze(_)
            | Verb::HostReboot(_)
            | Verb::Migrate(_)
    ) {
        // Where it is refused all is as it always was.
        let _ = dewar_kernel::run_on();
    }
    if matches!(cli.verb, Verb::Checkpoint(_)) {
        match run_as_child() {
            None => {}
            Some(AsChild::Ended(code)) => return code,
            Some(AsChild::Orphan) => {
                let what = "the process that this one works for has ended";
                let failure = Failure::new(Code::Failed, what).state("nothing was done");
                return output::report(&failure, json);
            }
        }
    }
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => output::report(&failure, json),
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
        Verb::Cache(args) => verbs::cache::run(&context, args),
        Verb::Reboot(args) => verbs::reboot::run(&context, &args),
        Verb::Rm(args) => verbs::rm::run(&context, args),
        Verb::Checkpoint(args) => verbs::checkpoint::run(&context, args),
        Verb::Upgrade(args) => verbs::upgrade::run(&context, args),
        Verb::Freeze(args) => verbs::freeze::run(&context, args),
        Verb::Thaw(args) => verbs::thaw::run(&context, args),
        Verb::HostReboot(args) => verbs::host_reboot::run(&context, &args),
        Verb::Migrate(args) => verbs::migrate::run(&context, args),
        Verb::Receive => verbs::receive::run(&context),
        Verb::Qos(args) => verbs::qos::run(&context, args),
        Verb::Ls(args) => verbs::ls::run(&context, args),
        Verb::Restore(args) => verbs::restore::run(&context, args),
        Verb::Verify(args) => verbs::verify::run(&context, args),
        Verb::Delete(args) => verbs::delete::run(&context, args),
        Verb::Gc(args) => verbs::gc::run(&context, args),
        Verb::Diff(args) => verbs::diff::run(&context, args),
        Verb::Report(args) => verbs::report::run(&context, args),
        Verb::Warm(args) => verbs::warm::run(&context, &args),
        Verb::CoolReport(args) => verbs::cool_report::run(&context, &args),
        Verb::Doctor(args) => verbs::doctor::run(&context, args),
        Verb::Completions(args) => verbs::manual::completions(args),
        Verb::Man(args) => verbs::manual::man(args),
        Verb::Guardian(args) => {
            guardian::watch(&context.registry, &args.name, args.store.as_deref(), args.container)
        }
        Verb::HostRebootWatcher(args) => {
            let progress = Progress::new("watching a reboot of the host");
            host_reboot::watch(&context, args.files, &progress)
        }
        Verb::Disks(args) => {
            served_disks::supervise(&context, &args.name, &Progress::new("serving disks"))
        }
        Verb::DiskServer(args) => served_disks::serve(&context, &args.name),
        Verb::QosWatchdog(args) => qos::watchdog::watch(&context, &args.name),
        Verb::Serve(args) => {
            let source = Source { store: args.store, image: args.image, dead: args.dead };
            serve(&context.registry, &args.name, source)
        }
    }
}
