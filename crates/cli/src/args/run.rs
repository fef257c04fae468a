use clap::{Args, ValueEnum};
use dewar_units::{ByteSize, parse_duration};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  dewar run web -- qemu-system-x86_64 -m 2G -nographic \
    -drive file=web.qcow2,if=virtio\n  \
    dewar run mail --disk mail.raw,cache=warm -- qemu-system-x86_64 -m 2G -nographic")]
pub struct RunArgs {
    /// The guest's name: letters, digits, '-', '_', '.'; at most 40.
    pub name: String,
    /// Folder for the RAM file, a tmpfs [default: root's /run/dewar/ram, with huge pages;
    /// /dev/shm where it has them, or Dewar cannot mount]; or one in persistent memory (DAX), which 'dewar host-reboot'
    /// keeps.
    #[arg(long, visible_alias = "memory-dir", value_name = "DIR")]
    pub ram_dir: Option<PathBuf>,
    /// Start it also where its memory does not fit beside what other guests may still take.
    #[arg(long)]
    pub overcommit: bool,
    /// Add a serial port on which the guest tells how it meets its deadlines, for 'dewar qos'.
    #[arg(long)]
    pub qos: bool,
    /// A disk that Dewar serves: a file or block device. With 'cache=warm' the guest's cache of it outlives a reboot of
    /// the guest. It is a virtio-blk device, or whichever names it: drive=disk0, disk1 and so on, or its id.
    #[arg(
        long = "disk",
        value_name = "PATH[,format=raw|qcow2][,readonly][,cache=warm][,cache-size=SIZE][,id=ID]"
    )]
    pub disks: Vec<String>,
    /// The QEMU command line.
    #[arg(last = true, required = true, num_args = 1..)]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dewar reboot web")]
pub struct RebootArgs {
    /// The guest.
    pub name: String,
    /// How long the guest may take until it resets itself.
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = parse_duration)]
    pub timeout: Duration,
    /// Press the reset button: what the guest has not written to its disks is lost.
    #[arg(long)]
    pub now: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  dewar cache web off\n  dewar cache web on --disk disk1 --size 2G"
)]
pub struct CacheArgs {
    /// The guest.
    pub name: String,
    /// Whether what the guest had cached is to be found again after a reboot.
    pub wanted: OnOff,
    /// One disk alone, by its id.
    #[arg(long, value_name = "ID")]
    pub disk: Option<String>,
    /// Most that is kept, with that of the guest's other disks [default: as it was, or as much as it has memory].
    #[arg(long, value_name = "SIZE")]
    pub size: Option<ByteSize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    On,
    Off,
}
