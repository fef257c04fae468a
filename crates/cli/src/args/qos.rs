use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  dewar qos film --target 30/s\n  dewar qos film --target 30/s --miss 1% --max 60% --detach\n  \
    dewar qos player --pid 4711 --target 60/s\n  dewar qos --status\n  dewar qos film --release"
)]
pub struct QosArgs {
    /// The guest; with --pid any name.
    #[arg(required_unless_present_any = ["status", "pid"])]
    pub name: Option<String>,
    /// Jobs a second, from 0.25/s to 500/s.
    #[arg(long, value_name = "N/s", value_parser = parse_rate)]
    #[arg(required_unless_present_any = ["status", "release"])]
    pub target: Option<f64>,
    /// The share of jobs that may miss their deadlines.
    #[arg(long, value_name = "SHARE", default_value = "0.1%", value_parser = parse_share)]
    pub miss: f64,
    /// The most of a CPU for each vCPU or thread.
    #[arg(long, value_name = "SHARE", default_value = "80%", value_parser = parse_share)]
    pub max: f64,
    /// The least.
    #[arg(long, value_name = "SHARE", default_value = "5%", value_parser = parse_share)]
    pub min: f64,
    /// A process, or the first of a container: the busiest threads of it and of all below it.
    #[arg(long, value_name = "PID")]
    pub pid: Option<i32>,
    /// How many threads of a process.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "pid")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    pub threads: u16,
    /// The socket for heartbeats [default: a VM's serial port; for a process ROOT/qos/NAME.sock,
    /// to be told to it as DEWAR_BEAT].
    #[arg(long, value_name = "SOCK")]
    pub port: Option<PathBuf>,
    /// How the reservation is found.
    #[arg(long, value_enum, default_value_t = LawChoice::Demand)]
    pub law: LawChoice,
    /// Of the stepwise law: jobs without a miss after which it steps down [default: a second's].
    #[arg(long, value_name = "JOBS", value_parser = clap::value_parser!(u32).range(1..))]
    pub patience: Option<u32>,
    /// How CPU time is given.
    #[arg(long, value_enum, default_value_t = ByChoice::Auto)]
    pub by: ByChoice,
    /// Let it take what other reservations leave, even beyond --max.
    #[arg(long)]
    pub reclaim: bool,
    /// Admit it even where not all guests can have their --max at once.
    #[arg(long)]
    pub overcommit: bool,
    /// Go on in the background.
    #[arg(long)]
    pub detach: bool,
    /// Tell every reservation.
    #[arg(long, conflicts_with_all = ["target", "release", "pid", "detach"])]
    pub status: bool,
    /// With --status: tell again every second, until Ctrl-C.
    #[arg(long)]
    pub watch: bool,
    /// End it. With --pid and no name: take reservations from a process's threads that no
    /// controller holds any more.
    #[arg(long, conflicts_with_all = ["target", "detach"])]
    pub release: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LawChoice {
    /// What the last jobs took, and a margin that the misses set.
    Demand,
    /// A step up at a miss, a step down after a second without.
    Stepwise,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ByChoice {
    /// By deadlines, or else by weight.
    Auto,
    /// SCHED_DEADLINE.
    Deadline,
    /// The CPU weight of a control group.
    Weight,
}

#[derive(Debug, Args)]
pub struct WatchdogArgs {
    pub name: String,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let number = text.trim().strip_suffix("/s").unwrap_or(text.trim());
    let rate: f64 = number.parse().map_err(|_| "a rate is such as 30/s".to_owned())?;
    // SCHED_DEADLINE takes periods to 4 s; below 2 ms the loop is too slow.
    if (0.25..=500.0).contains(&rate) { Ok(rate) } else { Err("from 0.25/s to 500/s".to_owned()) }
}

fn parse_share(text: &str) -> Result<f64, String> {
    let number = text.trim().strip_suffix('%').ok_or("a share is such as 5%")?;
    let percent: f64 = number.parse().map_err(|_| "a share is such as 5%".to_owned())?;
    if (0.0..=100.0).contains(&percent) {
        Ok(percent / 100.0)
    } else {
        Err("from 0% to 100%".to_owned())
    }
}
