use crate::slow_disk::run;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A disk of a test guest.
#[derive(Debug, Clone)]
pub struct DiskSpec {
    /// `qcow2` or `raw`.
    pub format: &'static str,
    /// QEMU's `cache=`.
    pub cache: &'static str,
    /// Its size.
    pub mib: u64,
    /// Whether it has a file system (ext4), empty.
    pub file_system: bool,
}

impl Default for DiskSpec {
    fn default() -> Self {
        Self { format: "qcow2", cache: "writeback", mib: 64, file_system: false }
    }
}

/// A test guest.
#[derive(Debug, Clone)]
pub struct GuestSpec {
    /// RAM.
    pub memory_mib: u64,
    /// vCPUs.
    pub vcpus: u32,
    /// Writable disks.
    pub disks: Vec<DiskSpec>,
    /// A read-only disk, after the others.
    pub sample: Option<PathBuf>,
    /// Disks that Dewar serves: the values of `--disk`.
    pub served: Vec<String>,
    /// More words for `dewar run`.
    pub run_words: Vec<String>,
    /// Variables of `dewar run`, and so of the processes beside the guest.
    pub environment: Vec<(String, String)>,
    /// More QEMU arguments.
    pub extra: Vec<String>,
    /// `-accel`.
    pub accel: String,
    /// Whether it has a port for heartbeats.
    pub qos: bool,
    /// Whether its initramfs has the guest agent, and the programs with deadlines; with `qos` it has them, too.
    pub has_agent: bool,
    /// Whether its boot leaves out what no test needs.
    pub boots_quickly: bool,
    /// The time between two beats of its second serial port, in milliseconds. Beats cost a third
    /// of a core where one comes each millisecond: a guest to which nobody listens has few.
    pub beat_ms: u64,
    /// Whether it has what QEMU gives a machine by itself.
    pub defaults: bool,
    /// Whether it has something to boot. One that has not is a machine at its firmware's end: nothing in
    /// it can be asked.
    pub boots: bool,
}

impl Default for GuestSpec {
    fn default() -> Self {
        Self {
            memory_mib: 256,
            vcpus: 1,
            disks: vec![DiskSpec::default()],
            sample: None,
            served: Vec::new(),
            run_words: Vec::new(),
            environment: Vec::new(),
            extra: Vec::new(),
            accel: std::env::var("DEWAR_TEST_ACCEL").unwrap_or_else(|_| "tcg".to_owned()),
            qos: false,
            has_agent: false,
            boots_quickly: true,
            beat_ms: 100,
            defaults: false,
            boots: true,
        }
    }
}

/// Words of the kernel's command line that leave out a fourth of an emulated processor's boot: patching
/// the kernel for one processor, and testing its own ciphers. No test looks at that.
const QUICK_BOOT: &str = "noreplace-smp cryptomgr.notests apparmor=0 \
    initcall_blacklist=crypto_kdf108_init,init_kprobe_trace,load_system_certificate_list,slab_sysfs_init";

/// The QEMU that the tests run.
pub fn qemu() -> String {
    std::env::var("DEWAR_TEST_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned())
}

/// Another version of QEMU, to upgrade to; `None` where there is none.
pub fn next_qemu() -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/qemu-next");
    let program = program.canonicalize().ok()?.join("qemu-system-x86_64");
    program.exists().then_some(program)
}

/// The test guest's kernel and initramfs.
///
/// # Errors
/// Where they were not built.
pub fn guest_files() -> Result<(PathBuf, PathBuf)> {
    let folder = std::env::var_os("DEWAR_TEST_GUEST").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/guest"),
        PathBuf::from,
    );
    let folder = folder.canonicalize().unwrap_or(folder);
    let (unpacked, initrd) = (folder.join("vmlinux"), folder.join("initrd"));
    let kernel = if unpacked.exists() { unpacked } else { folder.join("vmlinuz") };
    if !initrd.exists() {
        bail!("{} is missing: run scripts/build-guest.sh, or 'make test'", initrd.display());
    }
    Ok((kernel, initrd))
}

impl GuestSpec {
    /// A Debian that `scripts/debian-guest.sh` made in a folder, with its disk as the first one, which the caller gives it, and
    /// more QEMU arguments.
    pub fn debian(made: &Path, more: &[&str]) -> Self {
        let file = |name: &str| made.join(name).display().to_string();
        // What is said last counts.
        let system = [
            "-kernel",
            &file("vmlinuz"),
            "-initrd",
            &file("initrd"),
            "-append",
            "quiet panic=-1 mitigations=off audit=0 systemd.show_status=0",
        ];
        let extra = system.iter().chain(more).map(|word| (*word).to_owned()).collect();
        Self { memory_mib: 1024, disks: Vec::new(), extra, ..Self::default() }
    }

    /// What a benchmark's guest begins with: it boots as any would.
    pub fn measured() -> Self {
        Self { boots_quickly: false, ..Self::default() }
    }

    /// The kernel's command line.
    pub(crate) fn kernel_words(&self) -> String {
        let quick = if self.boots_quickly { QUICK_BOOT } else { "" };
        let beat = self.beat_ms;
        format!("console=ttyS0 quiet panic=-1 mitigations=off audit=0 {quick} beat_ms={beat}")
    }

    /// The QEMU command line, without any thought of Dewar; serial ports and
    /// disks lie in `folder`.
    ///
    /// # Errors
    /// Where the guest was not built or a disk cannot be made.
    pub fn command(&self, folder: &Path) -> Result<Vec<String>> {
        let (kernel, initrd) = guest_files()?;
        let mut line: Vec<String> = vec![qemu()];
        let mut add = |words: &[&str]| line.extend(words.iter().map(|word| (*word).to_owned()));
        add(&["-machine", "q35", "-accel", &self.accel, "-m", &format!("{}M", self.memory_mib)]);
        if self.accel == "kvm" {
            add(&["-cpu", "host"]);
        }
        add(&["-smp", &self.vcpus.to_string(), "-display", "none"]);
        if !self.defaults {
            add(&["-nodefaults", "-vga", "none"]);
        }
        if self.boots {
            let small = initrd.with_file_name("initrd-small");
            let takes_all = self.qos || self.has_agent || !self.boots_quickly || !small.exists();
            let initrd = if takes_all { initrd } else { small };
            let (kernel, initrd) = (kernel.display().to_string(), initrd.display().to_string());
            add(&["-kernel", &kernel, "-initrd", &initrd]);
            add(&["-append", &self.kernel_words()]);
        }
        for (number, name) in ["console", "heartbeat"].into_iter().enumerate() {
            let path = folder.join(name).display().to_string();
            add(&["-chardev", &format!("socket,id=s{number},path={path},server=on,wait=off")]);
            add(&["-serial", &format!("chardev:s{number}")]);
        }
        for (number, disk) in self.disks.iter().enumerate() {
            let path = folder.join(format!("disk{number}.{}", disk.format)).display().to_string();
            make_disk(&path, disk)?;
            let aio = if disk.cache == "none" { ",aio=native" } else { "" };
            let DiskSpec { format, cache, .. } = disk;
            add(&["-drive", &format!("file={path},format={format},if=virtio,cache={cache}{aio}")]);
        }
        if let Some(sample) = &self.sample {
            let path = sample.display();
            add(&["-drive", &format!("file={path},format=raw,if=virtio,readonly=on")]);
        }
        line.extend(self.extra.iter().cloned());
        Ok(line)
    }
}

fn make_disk(path: &str, disk: &DiskSpec) -> Result<()> {
    if Path::new(path).exists() {
        return Ok(());
    }
    if !disk.file_system {
        let (create, size) = (["create", "-q", "-f", disk.format, path], format!("{}M", disk.mib));
        return run(Command::new("qemu-img").args(create).arg(size));
    }
    let plain = format!("{path}.plain");
    std::fs::File::create(&plain)?.set_len(disk.mib << 20)?;
    run(Command::new("mkfs.ext4").args(["-q", "-F", &plain]))?;
    run(Command::new("qemu-img").args(["convert", "-q", "-O", disk.format, &plain, path]))?;
    Ok(std::fs::remove_file(plain)?)
}
