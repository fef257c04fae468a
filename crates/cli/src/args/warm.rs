use clap::Args;
use dewar_units::{ByteSize, parse_duration};
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  dewar warm shop --learn\n  dewar warm shop --learn=1m --save shop.hot\n  dewar warm shop\n  \
                  dewar warm shop --from shop.hot --limit 2G"
)]
pub struct WarmArgs {
    /// The guest.
    pub name: String,
    /// Watch which pages it reads for so long, and keep which are used again: nothing is read for it.
    #[arg(
        long,
        value_name = "TIME",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "10s",
        value_parser = parse_duration
    )]
    pub learn: Option<Duration>,
    /// Write what was learnt into this file, too.
    #[arg(long, value_name = "FILE", requires = "learn")]
    pub save: Option<PathBuf>,
    /// Take what such a file says, in place of what was learnt here.
    #[arg(long, value_name = "FILE", conflicts_with = "learn")]
    pub from: Option<PathBuf>,
    /// Read no more than so much.
    #[arg(long, value_name = "SIZE", conflicts_with = "learn")]
    pub limit: Option<ByteSize>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar cool-report shop")]
pub struct CoolReportArgs {
    /// The guest.
    pub name: String,
    /// Also files of which nothing is hot.
    #[arg(long)]
    pub all: bool,
}
