//! The hosts, and a guest on them.

use dewar_testkit::{Console, LabHost, Ran, lab_disks, wait_until};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tempfile::TempDir;

/// The lab, which one test has at a time.
struct Lab {
    a: LabHost,
    b: LabHost,
    /// Has the shared disks.
    server: LabHost,
}

static LAB: Lab = Lab { a: LabHost::new("a"), b: LabHost::new("b"), server: LabHost::new("s") };
static IN_USE: Mutex<()> = Mutex::new(());

/// Where the guest's disk is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disk {
    /// On the NFS server.
    Shared,
    /// On the host's own disk.
    Own,
}

/// The command line of the guest, whose sockets are in a folder.
fn guest(files: &str, sockets: &str, disk: &str) -> String {
    format!(
        "run g -- qemu-system-x86_64 -machine pc-q35-7.2 -accel tcg -cpu qemu64 -m 128M -display none \
         -nodefaults -vga none -kernel {files}/vmlinux -initrd {files}/initrd \
         -append console=ttyS0\\ quiet\\ panic=-1\\ mitigations=off\\ audit=0\\ beat_ms=100 \
         -chardev socket,id=s0,path={sockets}/console,server=on,wait=off -serial chardev:s0 -serial null \
         -monitor unix:{sockets}/monitor,server=on,wait=off \
         -drive file={disk},format=qcow2,if=virtio,cache=none"
    )
}

/// Boots the guest on this machine, where that takes seconds and not minutes; its disk has its state as the
/// snapshot "booted" then.
fn boot_guest(disk: &Path) {
    let lab = dewar_testkit::Lab::new(env!("CARGO_BIN_EXE_dewar")).expect("a lab");
    let folder = TempDir::new().expect("folder");
    let folder = folder.path();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(disk).arg("64M");
    assert!(create.status().expect("qemu-img").success());
    let (_, initrd) = dewar_testkit::guest_files().expect("guest");
    let files = initrd.parent().expect("folder").display().to_string();
    let line = guest(&files, &folder.display().to_string(), &disk.display().to_string());
    let line = format!("{} --root {} {line}", lab.program().display(), lab.root().display());
    Ran::of(&Command::new("sh").args(["-c", &line]).output().expect("sh")).done();
    let mut console = Console::connect(&folder.join("console")).expect("console");
    console.wait_ready(Duration::from_secs(60)).expect("the guest is up");
    ask_monitor(&folder.join("monitor"), "savevm booted");
    lab.dewar(&["stop", "g", "--now"]).done();
}

/// What a person would type into QEMU's monitor, which answers with a prompt when it is done.
fn ask_monitor(socket: &Path, line: &str) {
    let mut monitor = None;
    wait_until("QEMU's monitor", Duration::from_secs(20), || {
        monitor = UnixStream::connect(socket).ok();
        monitor.is_some()
    });
    let mut monitor = monitor.expect("monitor");
    for words in ["", &format!("{line}\n")] {
        monitor.write_all(words.as_bytes()).expect("monitor");
        let mut said = String::new();
        let mut byte = [0];
        while !said.ends_with("(qemu) ") {
            monitor.read_exact(&mut byte).expect("monitor");
            said.push(char::from(byte[0]));
        }
        assert!(!said.contains("Error"), "{line}: {said}");
    }
}

/// Starts hosts that are not up, and the one with their shared disks.
fn bring_up(hosts: &[&LabHost]) {
    if !LAB.server.is_up() {
        boot_guest(&lab_disks().join("booted.qcow2"));
        LAB.server.boot();
    }
    for host in hosts {
        if !host.is_up() {
            host.boot();
        }
        host.cable(true);
        host.link_is("");
    }
}

/// The first host alone, and no guest on it.
pub(crate) struct OneHost {
    pub host: &'static LabHost,
    _only: MutexGuard<'static, ()>,
}

impl OneHost {
    pub(crate) fn new() -> Self {
        let only = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        bring_up(&[&LAB.a]);
        Self { host: &LAB.a, _only: only }
    }
}

/// Both hosts, and no guest.
pub(crate) struct TwoHosts {
    pub a: &'static LabHost,
    pub b: &'static LabHost,
    _only: MutexGuard<'static, ()>,
}

impl TwoHosts {
    pub(crate) fn new() -> Self {
        let only = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        bring_up(&[&LAB.a, &LAB.b]);
        Self { a: &LAB.a, b: &LAB.b, _only: only }
    }
}

/// Both hosts, and a guest on the first that writes and checks what it wrote.
pub(crate) struct Hosts {
    pub a: &'static LabHost,
    pub b: &'static LabHost,
    /// A way to a host's sockets.
    forward: Option<(Child, TempDir)>,
    _only: MutexGuard<'static, ()>,
}

impl Hosts {
    pub(crate) fn new(disk: Disk) -> Self {
        Self::with(disk, 1000)
    }

    /// The same with a guest that writes so many pages again and again.
    pub(crate) fn with(disk: Disk, pages: u64) -> Self {
        let only = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let Lab { a, b, .. } = &LAB;
        bring_up(&[a, b]);
        let mut hosts = Self { a, b, forward: None, _only: only };
        hosts.start_guest(disk, pages);
        hosts
    }

    fn start_guest(&mut self, disk: Disk, pages: u64) {
        let (on, folder, path) = match disk {
            Disk::Shared => (&LAB.server, "/srv/disks", "/mnt/disks/g.qcow2"),
            Disk::Own => (self.a, "/root", "/root/g.qcow2"),
        };
        on.run(&format!("cat /dev/vdc > {folder}/g.qcow2")).done();
        self.a.run(&format!("dewar {}", guest("/lab/guest", "/run", path))).done();
        ask_monitor(&self.way_to(self.a, "monitor"), "loadvm booted");
        ask_monitor(&self.way_to(self.a, "monitor"), "delvm booted");
        self.console(self.a).ask(&format!("check {pages} 1 disk")).expect("check");
    }

    /// The guest's console on a host.
    fn console(&mut self, host: &LabHost) -> Console {
        Console::connect(&self.way_to(host, "console")).expect("console")
    }

    /// A socket here that leads to one of the guest's there.
    fn way_to(&mut self, host: &LabHost, socket: &str) -> PathBuf {
        self.leave();
        let folder = TempDir::new().expect("folder");
        let local = folder.path().join(socket);
        let way = format!("{}:/run/{socket}", local.display());
        let forward = host.ssh(&["-N", "-L", &way]).spawn().expect("ssh");
        self.forward = Some((forward, folder));
        local
    }

    fn leave(&mut self) {
        if let Some((mut forward, _)) = self.forward.take() {
            let _ = forward.kill();
            let _ = forward.wait();
        }
    }

    /// How both tell of the guest, once no command works on it any more.
    pub(crate) fn states(&self) -> [String; 2] {
        let mut states = [String::new(), String::new()];
        wait_until("no command works on it", Duration::from_secs(60), || {
            states = [self.a, self.b].map(|host| host.state("g"));
            !states.iter().any(|state| state == "busy")
        });
        states
    }

    /// Waits until a QEMU waits for the guest on the other host, and a little longer.
    pub(crate) fn wait_until_it_arrives(&self) {
        wait_until("it arrives", Duration::from_secs(20), || {
            self.b.run("pgrep -x qemu-system-x86").code == 0
        });
        std::thread::sleep(Duration::from_secs(4));
    }

    /// That it runs on this host and is known on no other, and that each page and block is as its writer left it.
    pub(crate) fn assert_on(&mut self, host: &LabHost, after: &str) {
        let (here, other) = if std::ptr::eq(host, self.a) { (0, 1) } else { (1, 0) };
        let states = self.states();
        assert_eq!([&states[here], &states[other]], ["running", "-"], "{after}");
        self.console(host).ask("verify").unwrap_or_else(|error| panic!("{after}: {error}"));
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.leave();
        for host in [self.a, self.b] {
            // What a test that failed left behind nobody knows.
            if std::thread::panicking() {
                host.lose_power();
                host.throw_disk_away();
            } else if host.is_up() {
                host.run("dewar rm g --force; rm -f /root/g.qcow2 /mnt/disks/g.qcow2");
            }
        }
    }
}

/// The end of a command that was started.
pub(crate) fn end_of(child: Child) -> Ran {
    Ran::of(&child.wait_with_output().expect("wait"))
}
