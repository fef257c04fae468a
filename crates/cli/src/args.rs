//! The command line.

mod adopt;
mod checkpoint;
mod helpers;
mod host_reboot;
mod migrate;
mod qos;
mod run;
mod store;
mod warm;

use clap::{Args, Parser, Subcommand};
use dewar_units::parse_duration;
use std::path::PathBuf;
use std::time::Duration;

pub use adopt::AdoptArgs;
pub use checkpoint::{CheckpointArgs, CodecChoice, DedupChoice};
pub use helpers::{GuardianArgs, GuestName, ServeArgs, WatcherArgs};
pub use host_reboot::HostRebootArgs;
pub use migrate::{GpuChoice, MigrateArgs};
pub use qos::{ByChoice, LawChoice, QosArgs, WatchdogArgs};
pub use run::{CacheArgs, OnOff, RebootArgs, RunArgs};
pub use store::StoreArgs;
pub use warm::{CoolReportArgs, WarmArgs};

/// Keeps running machines warm: live checkpoint and restore of stock QEMU VMs.
#[derive(Debug, Parser)]
#[command(name = "dewar", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done, 1 failed with the guest unharmed, 2 usage, \
    3 no such guest, checkpoint, store, process or reservation, 4 not supported here, \
    5 failed and the guest needs attention.")]
pub struct Cli {
    /// Folder for guests and the default store.
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        default_value = "/var/lib/dewar",
        env = "DEWAR_ROOT"
    )]
    pub root: PathBuf,
    /// Print one JSON object on standard output.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Start a QEMU command line in the background.
    ///
    /// The command line is changed in two places only: RAM goes into a shared file, and a QMP socket
    /// is added. What cannot be taken is refused (exit 4), before anything starts or, what only QEMU
    /// can tell, just after.
    Run(RunArgs),
    /// Take over a QEMU, or a container, that somebody else started.
    ///
    /// A QEMU's RAM must be a shared file (memory-backend-file,share=on). Of a container its runtime is asked.
    /// Nothing is changed.
    Adopt(AdoptArgs),
    /// List guests.
    #[command(after_help = "Example:\n  dewar ps")]
    Ps,
    /// Tell everything about a guest.
    Inspect(InspectArgs),
    /// Shut a guest down.
    ///
    /// Asks the guest to power down, as its power button would, and ends QEMU when the time is up.
    Stop(StopArgs),
    /// Start a guest's OS anew, on the same QEMU.
    ///
    /// The guest is asked by its agent (qemu-ga), or by Ctrl-Alt-Delete where it has none. Of disks with a warm cache
    /// (run --disk ...,cache=warm) it finds what it had read in memory again.
    Reboot(RebootArgs),
    /// Say whether a guest's file cache is to outlive a reboot.
    ///
    /// Of the disks that Dewar serves (run --disk). What is known of them so far is forgotten, and the guest's I/O waits for
    /// a moment.
    Cache(CacheArgs),
    /// Forget a guest that has ended, and remove its files.
    ///
    /// The disks of a restored guest live in its folder: what it wrote since the restore is removed too.
    Rm(RmArgs),
    /// Save a running guest: its memory, its devices, its disks.
    ///
    /// The guest runs all the while but for one pause, in which the last pages, the devices and the
    /// disks are frozen at one instant.
    Checkpoint(CheckpointArgs),
    /// Replace the QEMU under a running guest.
    ///
    /// The guest's memory stays where it is; only its devices move to the new QEMU, which then has all
    /// that the old one had: disks, ports, sockets, logs. Without --qemu that is the program that the
    /// guest was started with, as it is installed now. Until the guest has moved, whatever fails leaves
    /// it running as it was.
    Upgrade(UpgradeArgs),
    /// End a guest's process and keep the guest where it is.
    ///
    /// The guest's memory stays in its RAM file, the state of its devices is written beside it, and QEMU
    /// ends. That outlives everything but a restart of the kernel; --to-store outlives that too.
    Freeze(FreezeArgs),
    /// Let a frozen guest go on.
    ///
    /// A guest whose memory was changed while it was frozen is refused.
    Thaw(ThawArgs),
    /// Start another kernel on this host while its guests keep their memory.
    ///
    /// The guests are frozen all at once, the kernel is replaced by kexec, and they go on: their memory is neither
    /// saved nor loaded. It must lie on a file system in persistent memory, or in RAM that the kernel's command line
    /// sets aside as such (run --memory-dir). Everything is checked before a guest is touched; whatever fails before
    /// the kernel starts leaves all of them running.
    HostReboot(HostRebootArgs),
    /// Move a running guest to another host.
    ///
    /// Its memory is sent while it runs; it stands still for the last pages and its devices, and goes on
    /// there. Its disks must be reached by both hosts, or are copied (--with-disks); a container's bundle and volumes
    /// must be there under the same paths. Whatever fails, it never runs on both; where it changed hands just then, '--resume' asks which of the two has it.
    Migrate(MigrateArgs),
    /// Take a guest from another host: 'migrate' there starts this here.
    ///
    /// It speaks with 'dewar migrate' over its standard input and output. Until the connections for pages have
    /// come it listens on a port, to the one that has the key of this migration.
    #[command(
        after_help = "Example:\n  dewar receive      as 'dewar migrate' starts it: ssh HOST dewar receive"
    )]
    Receive,
    /// Give a guest the CPU that its deadlines need.
    ///
    /// The guest tells after each job whether it met its deadline (see dewar-beat); from that and
    /// from the CPU time that its jobs take, the reservation of each of its vCPUs is set again, job by
    /// job. Until Ctrl-C, or until the guest ends; then its threads are as they were before.
    Qos(QosArgs),
    /// List checkpoints.
    Ls(LsArgs),
    /// Bring a guest back to the instant of a checkpoint.
    ///
    /// By default the guest runs as soon as the copies of its disks are checked, and its pages arrive
    /// as it touches them and in the background.
    /// The guest's own disk files are left alone: it runs on overlays over the saved disks.
    Restore(RestoreArgs),
    /// Read every byte of a checkpoint and check it.
    Verify(ReferenceArgs),
    /// Remove a checkpoint.
    Delete(DeleteArgs),
    /// Free what no checkpoint needs.
    ///
    /// Safe beside running checkpoints and restores, and if it is killed. A segment of which all
    /// checkpoints together need at most half is written anew without the rest.
    Gc(GcArgs),
    /// Tell which pages differ between two checkpoints.
    ///
    /// Pages that both share in the store are the same and are not read.
    Diff(DiffArgs),
    /// Draw a checkpoint as one page to look at in a browser.
    ///
    /// What was done when, with the pause marked; pages written in each epoch; pages by kind; sizes
    /// beside the guest's earlier checkpoints. The page needs nothing from elsewhere.
    Report(ReportArgs),
    /// Read the pages of a guest's files that it uses into the page cache.
    ///
    /// Which those are is learnt first (--learn): the kernel tells which pages the guest reads, and those that
    /// it read more than once count. They are read the most used first, by reads that give way to others',
    /// and not where the host is short of memory. The guest runs all the while.
    Warm(WarmArgs),
    /// Tell how much of a guest's files is in the page cache, and what of that it uses.
    CoolReport(CoolReportArgs),
    /// Tell what this host can do and what is missing.
    Doctor(DoctorArgs),
    /// Print a completion script for a shell.
    Completions(CompletionsArgs),
    /// Write the man pages into a folder.
    Man(ManArgs),
    #[command(name = "__guardian", hide = true)]
    Guardian(GuardianArgs),
    #[command(name = "__host-reboot-watcher", hide = true)]
    HostRebootWatcher(WatcherArgs),
    #[command(name = "__serve", hide = true)]
    Serve(ServeArgs),
    #[command(name = "__disks", hide = true)]
    Disks(GuestName),
    #[command(name = "__disk-server", hide = true)]
    DiskServer(GuestName),
    #[command(name = "__qos-watchdog", hide = true)]
    QosWatchdog(WatchdogArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar inspect web")]
pub struct InspectArgs {
    /// The guest.
    pub name: String,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar stop web --timeout 60s")]
pub struct StopArgs {
    /// The guest.
    pub name: String,
    /// How long the guest may take.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// End QEMU at once, without asking the guest, in whatever state it is.
    #[arg(long)]
    pub now: bool,
    /// Give up a frozen guest: its memory is lost.
    #[arg(long)]
    pub yes: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar rm web")]
pub struct RmArgs {
    /// The guest.
    pub name: String,
    /// End it first if it runs (an adopted one too; without this it is only forgotten); give up a
    /// frozen one.
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct WhichArgs {
    /// The guest.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub name: Option<String>,
    /// Every guest that it can be done with.
    #[arg(long)]
    pub all: bool,
    /// How many at a time [default: for each CPU one by upgrade, two by freeze and thaw].
    #[arg(long, value_name = "N", requires = "all")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub jobs: Option<u16>,
}

impl WhichArgs {
    /// How many guests at a time: for each CPU so many by default. More than one
    /// lengthens the gap of each, where they run meanwhile.
    pub fn jobs(&self, for_each_cpu: usize) -> usize {
        let cpus = || std::thread::available_parallelism().map_or(1, usize::from);
        self.jobs.map_or_else(|| for_each_cpu * cpus(), usize::from)
    }
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  dewar upgrade web\n  dewar upgrade --all --qemu /opt/qemu/bin/qemu-system-x86_64"
)]
pub struct UpgradeArgs {
    #[command(flatten)]
    pub which: WhichArgs,
    /// The new QEMU program.
    #[arg(long, value_name = "PATH")]
    pub qemu: Option<PathBuf>,
    /// Go on although something is lost, such as connections through user-mode networking.
    #[arg(long)]
    pub yes: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  dewar freeze web\n  dewar freeze web --to-store\n  \
                  dewar freeze --all --to-store=redis://10.0.0.5")]
pub struct FreezeArgs {
    #[command(flatten)]
    pub which: WhichArgs,
    /// Do not keep checksums of the memory: 'thaw' then cannot tell whether it changed.
    #[arg(long, conflicts_with = "to_store")]
    pub no_checksum: bool,
    /// Keep it as a checkpoint, in the default store or in URL, and give its memory back.
    #[arg(
        long,
        value_name = "URL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = ""
    )]
    pub to_store: Option<String>,
    /// Wait as long as this for another dewar command that works on the guest.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = parse_duration)]
    pub wait: Duration,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  dewar thaw web\n  dewar thaw --all")]
pub struct ThawArgs {
    #[command(flatten)]
    pub which: WhichArgs,
    /// Also where a disk was written while it was frozen.
    #[arg(long, conflicts_with = "all")]
    pub force: bool,
    /// What becomes of the guest's clock, which stood still with it.
    #[arg(long, value_enum, default_value_t = ClockChoice::Step)]
    pub clock: ClockChoice,
}

/// What becomes of the clock of a guest that is brought back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ClockChoice {
    /// It is set to the host's time, where a guest agent does that.
    Step,
    /// It goes on from when the guest was saved.
    Keep,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar gc --dry-run")]
pub struct GcArgs {
    /// Only say what would be freed.
    #[arg(long)]
    pub dry_run: bool,
    /// Forget what killed checkpoints left in dirty stores that will never answer again.
    #[arg(long, conflicts_with = "dry_run")]
    pub only_here: bool,
    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar diff before-upgrade web")]
pub struct DiffArgs {
    /// A checkpoint.
    pub a: String,
    /// Another.
    pub b: String,
    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar report before-upgrade -o report.html")]
pub struct ReportArgs {
    /// The checkpoint.
    #[arg(value_name = "REF")]
    pub reference: String,
    /// The file to write [default: the checkpoint's id, with .html, in this folder].
    #[arg(short, long, value_name = "FILE.html")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar ls --guest web")]
pub struct LsArgs {
    /// Only this guest's.
    #[arg(long, value_name = "NAME")]
    pub guest: Option<String>,
    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  dewar restore before-upgrade\n  dewar restore web --as web2 --eager"
)]
pub struct RestoreArgs {
    /// A checkpoint's id, its tag, a guest (its newest), GUEST:TAG, or the beginning of an id.
    pub reference: String,
    /// A name for the restored guest [default: the one it had].
    #[arg(long = "as", value_name = "NAME")]
    pub name: Option<String>,
    /// Give the network cards of a copy new addresses: it runs with their cables out until its guest
    /// agent has set them.
    #[arg(long, requires = "name", conflicts_with = "paused")]
    pub new_identity: bool,
    /// Bring back all memory before the guest runs.
    #[arg(long)]
    pub eager: bool,
    /// Leave the guest paused.
    #[arg(long)]
    pub paused: bool,
    /// Let the guest run also where it was paused when it was saved.
    #[arg(long, conflicts_with = "paused")]
    pub run: bool,
    /// What becomes of the guest's clock, which is as old as the checkpoint.
    #[arg(long, value_enum, default_value_t = ClockChoice::Step)]
    pub clock: ClockChoice,
    /// Start it also where its memory does not fit beside what other guests may still take.
    #[arg(long)]
    pub overcommit: bool,
    /// Take the place of the guest that has the name: it is ended if it runs, and given up if it is
    /// frozen.
    #[arg(long, visible_alias = "yes")]
    pub replace: bool,
    /// Folder for the RAM file, a tmpfs [default: root's /run/dewar/ram, with huge pages;
    /// /dev/shm where it has them, or Dewar cannot mount].
    #[arg(long, value_name = "DIR")]
    pub ram_dir: Option<PathBuf>,
    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "The checkpoint is named by its id, its tag, its guest (the newest), \
    GUEST:TAG, or the beginning of its id.\n\nExample:\n  dewar verify before-upgrade\n  dewar delete c1f00d")]
pub struct ReferenceArgs {
    /// The checkpoint.
    pub reference: String,
    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Debug, Args)]
pub struct DeleteArgs {
    #[command(flatten)]
    pub which: ReferenceArgs,
    /// Leave its pages in dirty stores where they are: for one that will never answer again.
    #[arg(long)]
    pub only_here: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar doctor\n  dewar doctor --container shop")]
pub struct DoctorArgs {
    /// Tell what keeps this container, a guest, from being saved.
    #[arg(long, value_name = "NAME")]
    pub container: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar completions bash > /etc/bash_completion.d/dewar")]
pub struct CompletionsArgs {
    /// The shell.
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar man /usr/local/share/man/man1")]
pub struct ManArgs {
    /// The folder.
    pub folder: PathBuf,
}
