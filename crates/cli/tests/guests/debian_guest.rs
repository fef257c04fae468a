//! Reboots of a whole operating system, with systemd, from a disk that Dewar serves.

use crate::common;
use dewar_testkit::{GuestSpec, Lab, TestGuest};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Where the system is, if `scripts/debian-guest.sh` made one.
const MADE: &str = "DEWAR_TEST_DEBIAN";
/// How long it may take to boot, or to shut down.
const BOOTS_WITHIN: Duration = Duration::from_secs(180);

/// What the server says of itself is this old at most.
const TOLD: Duration = Duration::from_millis(1200);

struct Debian {
    lab: Lab,
    guest: TestGuest,
    disk: PathBuf,
}

impl Debian {
    fn new(made: &Path) -> Self {
        let lab = common::lab();
        let disk = lab.path().join("debian.img");
        let copied = Command::new("cp")
            .arg("--sparse=always")
            .args([&made.join("disk.img"), &disk])
            .status();
        assert!(copied.expect("cp").success());
        let agent = lab.guest_folder("g").expect("folder").join("agent.sock");
        let agent = format!("socket,id=agent,path={},server=on,wait=off", agent.display());
        let port = "virtserialport,chardev=agent,name=org.qemu.guest_agent.0";
        let more = ["-device", "virtio-serial-pci", "-chardev", &agent, "-device", port];
        let spec = GuestSpec { vcpus: 2, ..GuestSpec::debian(made, &more) };
        let line = spec.command(&lab.guest_folder("g").expect("folder")).expect("line");
        let served = format!("{},cache=warm", disk.display());
        let mut words = vec!["run", "g", "--disk", &served, "--"];
        words.extend(line.iter().map(String::as_str));
        lab.dewar(&words).done();
        let guest = lab.reach("g").expect("guest");
        Self { lab, guest, disk }
    }

    fn is_up(&mut self) {
        self.guest.console.wait_ready(BOOTS_WITHIN).expect("it boots");
    }

    fn ask(&mut self, command: &str) -> String {
        self.guest.console.ask(command).expect(command)
    }

    /// A number that is another where a file of the system is.
    fn sums(&mut self) -> String {
        self.ask("run sums")
    }

    fn told(&self) -> Value {
        self.lab.dewar(&["inspect", "g"]).done().json()["served_disks"].clone()
    }
}

#[test]
fn a_debian_with_systemd_finds_its_cache_after_resets_of_each_kind() {
    let Some(made) = std::env::var_os(MADE) else {
        println!(
            "SKIPPED a_debian_with_systemd_finds_its_cache_after_resets_of_each_kind: it runs in 'make test-debian'"
        );
        return;
    };
    let mut debian = Debian::new(Path::new(&made));
    let sums = debian.sums();
    let write = "run dd if=/dev/urandom of=/var/written bs=1M count=165 conv=fsync";
    // What is done before, the reset, and how much of what is read after it comes from memory at least. (Of what is known
    // a hundredth is the file system's journal, which is written and never read.)
    let resets = [
        ("systemctl reboot", "", "spawn systemctl reboot", 0.99),
        ("dewar reboot, by its agent", "", "agent", 0.99),
        ("a panic", "", "append /proc/sysrq-trigger c", 0.99),
        ("sysrq-b", "", "append /proc/sysrq-trigger b", 0.99),
        ("the reset button", "", "button", 0.99),
        ("165 MiB written, sysrq-b", write, "append /proc/sysrq-trigger b", 0.99),
        (
            "6 MB not written, sysrq-b",
            "run dd if=/dev/urandom of=/var/dirty bs=1M count=6",
            "append /proc/sysrq-trigger b",
            0.95,
        ),
        (
            "caches dropped, systemctl reboot",
            "append /proc/sys/vm/drop_caches 3",
            "spawn systemctl reboot",
            0.0,
        ),
    ];
    let number = |value: &Value| value.as_u64().expect("a number");
    let read = |told: &Value| ["from_memory", "from_disk"].map(|it| number(&told["disks"][0][it]));
    println!("reset\tknown\tkept\theld ms\tsearch ms\tread from memory\tboots and sums s");
    for (held, (name, first, reset, least)) in (1..).zip(resets) {
        if !first.is_empty() {
            debian.ask(first);
        }
        std::thread::sleep(TOLD);
        let before = read(&debian.told());
        let began = Instant::now();
        match reset {
            "agent" => drop(debian.lab.dewar(&["reboot", "g"]).done()),
            "button" => drop(debian.lab.dewar(&["reboot", "g", "--now"]).done()),
            words => debian.guest.console.send(words).expect("reset"),
        }
        debian.is_up();
        assert_eq!(debian.sums(), sums, "{name}");
        let took = began.elapsed();
        let mut told = Value::Null;
        let deadline = Instant::now() + TOLD * 10;
        while told["search"]["reset"] != held {
            assert!(Instant::now() < deadline, "{name}: nothing was searched: {told}");
            std::thread::sleep(TOLD / 4);
            told = debian.told();
        }
        std::thread::sleep(TOLD);
        told = debian.told();
        let search = &told["search"];
        let (known, kept) = (number(&search["known"]), number(&search["kept"]));
        let [memory, disk] = [0, 1].map(|at| (read(&told)[at] - before[at]) as f64);
        let share = memory / (memory + disk);
        println!(
            "{name}\t{known}\t{:.4}\t{:.1}\t{:.0}\t{share:.4}\t{:.1}",
            kept as f64 / known as f64,
            told["last_reset"]["held_ms"].as_f64().expect("ms"),
            search["took_ms"].as_f64().expect("ms"),
            took.as_secs_f64(),
        );
        assert_eq!(told["disks"][0]["wrong"], 0, "{told}");
        assert!(share >= least, "{name}: {told}");
    }
    debian.lab.dewar(&["stop", "g"]).done();
    let mut fsck = Command::new("e2fsck");
    assert!(fsck.args(["-f", "-n"]).arg(&debian.disk).status().expect("e2fsck").success());
}
