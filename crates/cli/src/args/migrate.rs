use super::CodecChoice;
use clap::{Args, ValueEnum};
use dewar_lifecycle::migrate::{GpuUse, PostCopy};
use dewar_units::parse_duration;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  dewar migrate web host2\n  dewar migrate web root@10.0.0.7 --max-downtime 200ms\n  \
                  dewar migrate web --via 'ip netns exec b'\n  dewar migrate web host2 --postcopy=auto\n  \
                  dewar migrate web host2 --with-disks --disk-map web.qcow2=/srv/web.qcow2\n  \
                  dewar migrate web --resume"
)]
pub struct MigrateArgs {
    /// The guest.
    pub name: String,
    /// The other host, as your ssh knows it.
    #[arg(required_unless_present_any = ["via", "resume", "abort", "take_back"])]
    pub host: Option<String>,
    /// A command that reaches the other host in place of 'ssh HOST': it runs the words behind it there.
    #[arg(long, value_name = "CMD")]
    pub via: Option<String>,
    /// The longest that the guest should stand still. Of a container: how long its last copies may take; CRIU's
    /// work comes on top.
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = parse_duration)]
    pub max_downtime: Duration,
    /// Let it run there before all of its memory has arrived: what it touches is sent at once, the rest in
    /// the background. 'auto': where it writes faster than its pages can be sent. If either host or the
    /// connection fails then, the guest waits for '--resume'; if this host is lost, so is the guest.
    #[arg(
        long,
        value_name = "WHEN",
        value_enum,
        num_args = 0..=1,
        require_equals = true,
        default_value_t = PostCopyChoice::Never,
        default_missing_value = "always"
    )]
    pub postcopy: PostCopyChoice,
    /// Slow the guest down where it writes faster than its pages can be sent, step by step until it fits: its
    /// vCPUs stand still for at most so many hundredths of the time. It runs as before at the other host,
    /// and here where it stays.
    #[arg(
        long,
        value_name = "PERCENT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "90",
        value_parser = clap::value_parser!(u8).range(1..=99)
    )]
    pub throttle: Option<u8>,
    /// How pages are compressed.
    #[arg(long, value_enum, default_value_t = CodecChoice::Auto)]
    pub codec: CodecChoice,
    /// Let a GPU compress pages, too. 'auto': where the connection outruns the cores, and it helps. 'always'
    /// takes any device that the drivers of CUDA and OpenCL show.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = GpuChoice::Auto)]
    pub gpu: GpuChoice,
    /// Send pages to this address of the other host, over TLS connections of their own [default: the one
    /// that ssh came by].
    #[arg(long, value_name = "ADDRESS")]
    pub address: Option<String>,
    /// Send pages through ssh, or what --via names, too.
    #[arg(long, conflicts_with = "address")]
    pub tunnel: bool,
    /// Only tell whether the other host takes it, and how long it would take: some pages are sent.
    #[arg(long)]
    pub dry_run: bool,
    /// Draw what was done when, what was written meanwhile and what was sent, as one page for a browser.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["dry_run", "resume", "abort", "take_back"])]
    pub report: Option<PathBuf>,
    /// Copy its disks, too: the other host gets files of its own, and those here stay as they are. They go
    /// through ssh, or what --via names.
    #[arg(long)]
    pub with_disks: bool,
    /// A disk of the guest is at the other host, or copied there, under another path.
    #[arg(long, value_name = "HERE=THERE", value_parser = parse_pair)]
    pub disk_map: Vec<(PathBuf, PathBuf)>,
    /// The --root at the other host.
    #[arg(long, value_name = "DIR")]
    pub remote_root: Option<PathBuf>,
    /// The dewar program at the other host.
    #[arg(long, value_name = "PATH", default_value = "dewar")]
    pub remote_dewar: String,
    /// Ask again what became of a guest that was given to the other host when the connection was lost.
    #[arg(long, conflicts_with_all = ["host", "via"])]
    pub resume: bool,
    /// Ask the other host to give it back, if it has not let it run; at the other host: refuse a guest that
    /// waits there.
    #[arg(long, conflicts_with_all = ["host", "via", "resume"])]
    pub abort: bool,
    /// Let a guest go on here that was given to the other host, without asking: be sure that it will never
    /// run there.
    #[arg(long, conflicts_with_all = ["host", "via", "resume", "abort"])]
    pub take_back: bool,
}

/// When a GPU compresses pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuChoice {
    /// Never.
    Never,
    /// Where it helps.
    Auto,
    /// Always.
    Always,
}

impl From<GpuChoice> for GpuUse {
    fn from(choice: GpuChoice) -> Self {
        match choice {
            GpuChoice::Never => Self::Never,
            GpuChoice::Auto => Self::Auto,
            GpuChoice::Always => Self::Always,
        }
    }
}

/// When a guest runs at the other host before all of its memory is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PostCopyChoice {
    /// Never.
    Never,
    /// Where it writes faster than its pages can be sent.
    Auto,
    /// As soon as every page was sent once.
    Always,
}

impl From<PostCopyChoice> for PostCopy {
    fn from(choice: PostCopyChoice) -> Self {
        match choice {
            PostCopyChoice::Never => Self::Never,
            PostCopyChoice::Auto => Self::Auto,
            PostCopyChoice::Always => Self::Always,
        }
    }
}

/// Two paths with a '=' between them.
fn parse_pair(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let (here, there) = text.split_once('=').ok_or("it is HERE=THERE, two paths")?;
    match Path::new(there).is_absolute() && !here.is_empty() {
        true => Ok((here.into(), there.into())),
        false => Err("the path at the other host begins with '/'".to_owned()),
    }
}
