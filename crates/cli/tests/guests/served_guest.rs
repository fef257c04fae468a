//! A guest whose disk Dewar serves, for the tests of such.

use crate::common;
use dewar_testkit::{Console, GuestSpec, Lab, TestGuest, guest_files, wait_until};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A guest with a served disk: a file system with some files of noise.
pub struct Warm {
    pub lab: Lab,
    pub guest: TestGuest,
    pub disk: PathBuf,
    pub sums: Vec<String>,
}

/// MiB of each file.
pub const FILES: [u64; 3] = [8, 16, 24];

/// How such a guest is started.
#[derive(Default)]
pub struct How<'h> {
    pub spec: GuestSpec,
    /// What is said of its disk.
    pub disk: &'h str,
    /// More words for `dewar run`.
    pub words: &'h [&'h str],
    /// For `dewar run`, and so for the processes beside the guest.
    pub environment: &'h [(&'h str, &'h str)],
}

impl Warm {
    pub fn new(options: &str) -> Self {
        Self::started(&How { disk: options, ..How::default() })
    }

    pub fn started(how: &How<'_>) -> Self {
        let lab = common::lab();
        let disk = make_disk(&lab);
        let guest = start(&lab, &disk, how);
        let mut this = Self { lab, guest, disk, sums: Vec::new() };
        this.mount();
        this.sums = this.read_all();
        this
    }

    /// Starts it again when it has ended.
    pub fn run_again(&mut self) {
        self.guest = start(&self.lab, &self.disk, &How { disk: "cache=warm", ..How::default() });
        self.mount();
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.guest.console.ask(command).expect(command)
    }

    pub fn mount(&mut self) {
        self.ask("run mount -t ext4 /dev/vda /mnt");
    }

    /// Reads all files; what they hold, in a number for each.
    pub fn read_all(&mut self) -> Vec<String> {
        (0..FILES.len()).map(|number| self.read(&format!("file{number}"))).collect()
    }

    /// Reads a file; what it holds, in a number, and how many bytes.
    pub fn read(&mut self, name: &str) -> String {
        let told = self.ask(&format!("sum /mnt/{name}"));
        // The third word is how long it took.
        told.rsplit_once(' ').expect("three words").0.to_owned()
    }

    /// Has the guest reset itself, and waits until it is up again.
    pub fn reboot(&mut self) {
        self.guest.console.send("spawn reboot -f").expect("reboot");
        self.is_up();
    }

    /// Another QEMU has it.
    pub fn is_again(&mut self) {
        self.guest.console = Console::connect(&self.guest.folder.join("console")).expect("console");
    }

    pub fn is_up(&mut self) {
        self.guest.console.wait_ready(Duration::from_secs(60)).expect("it boots");
        self.mount();
    }

    pub fn told(&self) -> Value {
        self.lab.dewar(&["inspect", "g"]).done().json()["served_disks"].clone()
    }

    /// The same; nothing while its supervisor has the guest, which it has at a reset.
    fn told_if_free(&self) -> Option<Value> {
        let ran = self.lab.dewar(&["inspect", "g"]);
        (ran.code == 0).then(|| ran.json()["served_disks"].clone())
    }

    /// Waits until the memory of before was searched for the nth time; what was found.
    pub fn searched(&self, held: u64) -> Value {
        let mut told = Value::Null;
        wait_until("the search", Duration::from_secs(20), || {
            told = self.told_if_free().unwrap_or_default();
            told["last_reset"]["held"] == held && told["search"]["reset"] == held
        });
        told
    }
}

fn start(lab: &Lab, disk: &Path, how: &How<'_>) -> TestGuest {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let spec = GuestSpec {
        disks: Vec::new(),
        served: vec![format!("{},{}", disk.display(), how.disk)],
        run_words: how.words.iter().map(|it| (*it).to_owned()).collect(),
        environment: how.environment.iter().map(own).collect(),
        ..how.spec.clone()
    };
    lab.run("g", &spec).expect("guest")
}

/// A raw disk with a file system, and files in it: a copy of one that is made once.
pub fn make_disk(lab: &Lab) -> PathBuf {
    let disk = lab.path().join("served.raw");
    let mut command = Command::new("cp");
    command.arg("--sparse=always").arg(first_disk(lab)).arg(&disk);
    assert!(command.status().expect("cp").success());
    disk
}

/// With the states of guests, which go when the guest's program is another. Of several that make it the
/// last one wins; a copy that has begun has what it began with.
fn first_disk(lab: &Lab) -> PathBuf {
    let folder = guest_files().expect("guest").1.with_file_name("warm");
    std::fs::create_dir_all(&folder).expect("folder");
    let made = folder.join("files.raw");
    if made.exists() {
        return made;
    }
    let part = made.with_extension(lab.path().file_name().expect("a name"));
    let files = lab.path().join("files");
    std::fs::create_dir_all(&files).expect("folder");
    for (number, mib) in FILES.iter().enumerate() {
        let mut state = 77 + number as u64;
        let noise: Vec<u8> = (0..mib << 17)
            .flat_map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state.to_le_bytes()
            })
            .collect();
        std::fs::write(files.join(format!("file{number}")), noise).expect("file");
    }
    let mut command = Command::new("mkfs.ext4");
    command.args(["-q", "-F", "-b", "4096", "-d"]).arg(&files).arg(&part).arg("160M");
    assert!(command.status().expect("mkfs.ext4").success());
    std::fs::rename(part, &made).expect("rename");
    made
}

/// That most of what was read before came from memory, and all is right.
pub fn is_warm(warm: &mut Warm, held: u64) {
    let found = warm.searched(held);
    let sums = warm.sums.clone();
    assert_eq!(warm.read_all(), sums);
    let kept = found["search"]["kept"].as_u64().expect("count");
    assert!(kept > 12_000, "{found}");
    let mut told = Value::Null;
    // It is told each second.
    wait_until("it to be read from memory", Duration::from_secs(10), || {
        told = warm.told();
        told["disks"][0]["kept"].as_u64().is_some_and(|left| left < kept / 100)
    });
    println!("{told}");
    assert_eq!(told["disks"][0]["wrong"], 0);
}

/// The processes of ours that serve a guest of a lab.
pub fn ours(lab: &Lab, verb: &str) -> Vec<i32> {
    let root = lab.root().display().to_string();
    common::processes(|words| words.contains(&root.as_str()) && words.contains(&verb))
}
