use clap::{Args, ValueEnum};
use dewar_lifecycle::host_reboot::{Fallback, Others};
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  dewar host-reboot --dry-run\n  dewar host-reboot --kernel /boot/vmlinuz-6.12.57 \
    --append \"$(cat /proc/cmdline)\"\n  dewar host-reboot --thaw      as dewar-host-thaw.service does after the boot"
)]
pub struct HostRebootArgs {
    /// The new kernel [default: the running one, from /boot].
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Its initramfs [default: the one beside it that has its version].
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Its command line [default: that of the running kernel].
    #[arg(long, value_name = "WORDS", allow_hyphen_values = true)]
    pub append: Option<String>,
    /// The running kernel again, with its own command line.
    #[arg(long, conflicts_with_all = ["kernel", "initrd", "append"])]
    pub reuse: bool,
    /// Tell what would be done and how long the guests would be away, and do nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Start the kernel at once, and do not ask the init system to end other services first.
    #[arg(long)]
    pub now: bool,
    /// What becomes of guests whose memory cannot be kept.
    #[arg(long, value_enum, default_value_t = OthersChoice::Refuse)]
    pub others: OthersChoice,
    /// What is done first for the case that the memory is lost [default: checkpoint, where there is a default store].
    #[arg(long, value_enum)]
    pub fallback: Option<FallbackChoice>,
    /// Do not compare checksums of the guests' memory before and after.
    #[arg(long)]
    pub no_checksum: bool,
    /// After the boot: let the guests go on that were kept.
    #[arg(long, conflicts_with_all = ["kernel", "initrd", "append", "reuse", "dry_run", "now"])]
    pub thaw: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OthersChoice {
    /// Freeze them into the default store, and thaw them from it.
    Store,
    /// Shut them down.
    Stop,
    /// Do not reboot the host.
    Refuse,
}

impl From<OthersChoice> for Others {
    fn from(choice: OthersChoice) -> Self {
        match choice {
            OthersChoice::Store => Self::Store,
            OthersChoice::Stop => Self::Stop,
            OthersChoice::Refuse => Self::Refuse,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FallbackChoice {
    /// Take a checkpoint of each guest, in the default store.
    Checkpoint,
    /// Nothing: a guest whose memory is lost is lost.
    None,
}

impl From<FallbackChoice> for Fallback {
    fn from(choice: FallbackChoice) -> Self {
        match choice {
            FallbackChoice::Checkpoint => Self::Checkpoint,
            FallbackChoice::None => Self::None,
        }
    }
}
