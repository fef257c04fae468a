//! Hosts that run guests under KVM, with memory that a kexec leaves as it is.

use dewar_testkit::{Console, LabHost, Ran, wait_until};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tempfile::TempDir;

static DAX_HOST: LabHost = LabHost::new("k");
static LUO_HOST: LabHost = LabHost::new("l");
static IN_USE: Mutex<()> = Mutex::new(());

/// Where the guests' memory is that is kept by a file system.
pub(crate) const KEPT: &str = "/mnt/keep";

/// What keeps the guests' memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeper {
    /// RAM that the kernel's command line sets aside, and a file system on it.
    Dax,
    /// The kernel.
    Luo,
}

impl Keeper {
    fn host(self) -> &'static LabHost {
        match self {
            Self::Dax => &DAX_HOST,
            Self::Luo => &LUO_HOST,
        }
    }

    /// The new kernel: the one that runs.
    pub(crate) fn kernel(self) -> &'static str {
        match self {
            Self::Dax => "--kernel /lab/vmlinuz --initrd /lab/initrd",
            Self::Luo => "--kernel /lab/vmlinuz-luo --initrd /lab/initrd",
        }
    }

    /// Whether it can be tried here; where not, says so.
    pub(crate) fn is_here(self) -> bool {
        let kernel = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/luo-kernel/vmlinuz");
        let is_here = self == Self::Dax || kernel.exists();
        if !is_here {
            println!(
                "SKIPPED with {self:?}: {} is missing (scripts/luo-kernel.sh makes it)",
                kernel.display()
            );
        }
        is_here
    }
}

/// The host, and guests on it that write and check what they wrote.
pub(crate) struct KvmHost {
    pub host: &'static LabHost,
    pub keeper: Keeper,
    guests: Vec<String>,
    _only: MutexGuard<'static, ()>,
}

impl KvmHost {
    /// With guests of these names; their memory is kept, or of those that begin with "other" not.
    pub(crate) fn with(keeper: Keeper, names: &[&str]) -> Self {
        let only = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        if !keeper.host().is_up() {
            keeper.host().boot();
        }
        let mut host = Self { host: keeper.host(), keeper, guests: Vec::new(), _only: only };
        host.make_memory();
        names.iter().for_each(|name| host.start_guest(name));
        host
    }

    /// Makes the file system that a host without power has lost.
    pub(crate) fn make_memory(&self) {
        if self.keeper == Keeper::Luo {
            return;
        }
        let make = format!(
            "mountpoint -q {KEPT} || {{ mkfs.ext4 -q -b 4096 -F /dev/pmem0 && mkdir -p {KEPT} && \
             mount -o dax /dev/pmem0 {KEPT}; }}"
        );
        self.host.run(&make).done();
    }

    pub(crate) fn start_guest(&mut self, name: &str) {
        self.start_guest_with(name, "");
    }

    /// The same with more QEMU arguments.
    pub(crate) fn start_guest_with(&mut self, name: &str, more: &str) {
        let is_on_dax = self.keeper == Keeper::Dax && !name.starts_with("other");
        let folder = if is_on_dax { "--memory-dir /mnt/keep" } else { "" };
        let line = format!(
            "dewar run {name} {folder} -- qemu-system-x86_64 -machine q35 -accel kvm -cpu host -m 128M -display none \
             -nodefaults -vga none -kernel /lab/guest/vmlinux -initrd /lab/guest/initrd \
             -append console=ttyS0\\ quiet\\ panic=-1\\ mitigations=off\\ audit=0\\ beat_ms=100 \
             -chardev socket,id=s0,path=/run/{name}.console,server=on,wait=off -serial chardev:s0 -serial null {more}"
        );
        self.host.run(&line).done();
        self.guests.push(name.to_owned());
        let mut way = self.way_to(name);
        way.console().wait_ready(Duration::from_secs(60)).expect("the guest is up");
        way.console().ask("check 500 1 none").expect("check");
    }

    /// A way to a guest's console.
    pub(crate) fn way_to(&self, name: &str) -> Way {
        let folder = TempDir::new().expect("folder");
        let local = folder.path().join("console");
        let way = format!("{}:/run/{name}.console", local.display());
        let mut command = self.host.ssh(&["-N", "-L", &way]);
        let forward = command.stdout(Stdio::null()).spawn().expect("ssh");
        let console = Console::connect(&local).expect("console");
        Way { console, forward, _folder: folder }
    }

    /// That each page of a guest is as its writer left it, and it writes on.
    pub(crate) fn assert_exact(&self, name: &str, after: &str) {
        let mut way = self.way_to(name);
        let mut ask = |line: &str| {
            way.console().ask(line).unwrap_or_else(|error| panic!("{name}, {after}: {error}"))
        };
        ask("verify");
        let before = ask("count");
        wait_until("it writes on", Duration::from_secs(10), || ask("count") != before);
    }

    /// The same of all.
    pub(crate) fn assert_all_exact(&self, after: &str) {
        self.guests.iter().for_each(|name| self.assert_exact(name, after));
    }

    /// The states of all.
    pub(crate) fn states(&self) -> Vec<String> {
        self.guests.iter().map(|name| self.host.state(name)).collect()
    }

    /// Reboots the host and waits until its new kernel has let the guests go on; what that told.
    pub(crate) fn reboot(&self, words: &str) -> serde_json::Value {
        self.begin_reboot(words);
        self.wait_until_it_is_back()
    }

    /// Has the host begin to reboot.
    pub(crate) fn begin_reboot(&self, words: &str) {
        self.host.run("rm -f /var/log/dewar-thaw.*").done();
        let line = format!("dewar host-reboot --now {} {words}", self.keeper.kernel());
        let ran = self.host.run(&line);
        assert_eq!(ran.code, 255, "its connection ends with its kernel: {ran:?}");
    }

    /// Waits for the new kernel; what was told of its guests.
    pub(crate) fn wait_until_it_is_back(&self) -> serde_json::Value {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let ran = self.host.run("cat /var/log/dewar-thaw.json /var/log/dewar-thaw.log");
            if ran.code == 0 {
                return serde_json::from_str(ran.stdout.lines().next().unwrap_or_default())
                    .unwrap_or_else(|error| panic!("{error}: {ran:?}"));
            }
            assert!(Instant::now() < deadline, "the new kernel does not come up: {ran:?}");
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Has a command stand just before the new kernel starts.
    pub(crate) fn stand_at_the_end(&self, words: &str) -> Child {
        self.host.make_dewar_that_stands_at("leaving");
        let line = format!("/root/held host-reboot --now {} {words}", self.keeper.kernel());
        let child = self.host.start(&line);
        self.host.wait_until_it_stands("leaving", "host-reboot --now");
        child
    }

    /// A command that ends itself at a step.
    pub(crate) fn die_at(&self, step: &str) -> Ran {
        let kernel = self.keeper.kernel();
        let line = format!(
            "DEWAR_TEST_SIGNAL='{step}:kill' dewar host-reboot --now {kernel} --fallback none"
        );
        self.host.run(&line)
    }
}

impl Drop for KvmHost {
    fn drop(&mut self) {
        // What a test that failed left behind nobody knows.
        if std::thread::panicking() {
            let told = self.host.run("cat /var/log/dewar-thaw.*; dewar ps; dmesg | tail -n 20");
            println!("{}{}", told.stdout, told.stderr);
            self.host.lose_power();
            self.host.throw_disk_away();
            return;
        }
        for name in &self.guests {
            self.host.run(&format!("dewar rm {name} --force")).done();
        }
        self.host.run("rm -rf /root/before-thaw /var/lib/dewar").done();
    }
}

/// A way to a console.
pub(crate) struct Way {
    console: Console,
    forward: Child,
    _folder: TempDir,
}

impl Way {
    pub(crate) fn console(&mut self) -> &mut Console {
        &mut self.console
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        let _ = self.forward.kill();
        let _ = self.forward.wait();
    }
}
