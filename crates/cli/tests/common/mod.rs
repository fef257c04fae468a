//! What the guest tests share.
#![allow(dead_code, reason = "each test file uses some of it")]

pub mod deadlines;

use dewar_image::{FrameCache, ImageId, Location, Store};
use dewar_testkit::{Lab, TestGuest, is_alive};
use dewar_units::{PAGE_BYTES, PageNumber};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

/// A lab whose guests need not boot.
pub fn lab() -> Lab {
    Lab::new(env!("CARGO_BIN_EXE_dewar")).expect("a lab").warm()
}

/// Copies a program by another process. If this one had the copy open for writing, so would any that a neighbouring test
/// starts meanwhile, until it calls exec(2); and what is open for writing cannot be executed.
pub fn copy_program(from: &std::path::Path, to: &std::path::Path) {
    let status = Command::new("cp").arg(from).arg(to).status();
    assert!(status.expect("cp").success(), "{} to {}", from.display(), to.display());
}

/// A checkpoint that stops itself (SIGSTOP) at a step.
pub struct HeldCheckpoint {
    pub child: Child,
    pub pid: i32,
}

impl HeldCheckpoint {
    /// Starts it and waits until it stands there.
    pub fn at(lab: &Lab, guest: &str, step: &str) -> Self {
        Self::at_with(lab, &["checkpoint", guest], step)
    }

    /// The same with a command line of one's own.
    pub fn at_with(lab: &Lab, line: &[&str], step: &str) -> Self {
        Self::at_command(lab.command(line), step)
    }

    /// The same with a command that is ready to be run.
    pub fn at_command(mut command: Command, step: &str) -> Self {
        let child = command
            .env("DEWAR_TEST_SIGNAL", format!("{step}:stop"))
            // Its guardian is patient while it stands there.
            .env("DEWAR_TEST_PAUSE_LIMIT", "300")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("dewar starts");
        let pid = child.id() as i32;
        dewar_testkit::wait_until(
            &format!("step {step}"),
            std::time::Duration::from_secs(300),
            || {
                assert!(dewar_testkit::is_alive(pid), "the checkpoint ended before step {step}");
                dewar_testkit::signal_stop(pid)
            },
        );
        Self { child, pid }
    }

    /// Lets it go on to its end; returns exit code, output and messages.
    pub fn go_on(self) -> (i32, String, String) {
        dewar_testkit::kill(self.pid, rustix::process::Signal::CONT);
        let output = self.child.wait_with_output().expect("wait");
        (
            output.status.code().unwrap_or(-1),
            String::from_utf8_lossy(&output.stdout).into_owned(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    }

    /// Kills it where it stands.
    pub fn kill(mut self) {
        let child = self.started("checkpoint");
        dewar_testkit::kill(self.pid, rustix::process::Signal::KILL);
        self.child.wait().expect("wait");
        if let Some(child) = child {
            dewar_testkit::wait_while_alive(child);
        }
    }

    /// The process that watches over it.
    pub fn guardian(&self) -> Option<i32> {
        self.started("__guardian")
    }

    /// The process that it started with this verb.
    pub fn started(&self, verb: &str) -> Option<i32> {
        started(self.pid, verb)
    }
}

/// The process that a command started with this verb, or its child did: it may be the
/// child of itself.
pub fn started(command: i32, verb: &str) -> Option<i32> {
    let children = children(command);
    let theirs = children.iter().flat_map(|child| self::children(*child));
    theirs.chain(children.iter().copied()).find(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(verb)
    })
}

/// The processes that a process started.
pub fn children(of: i32) -> Vec<i32> {
    let tasks = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children"));
    tasks.unwrap_or_default().split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// All processes whose command line, in words, is one of those.
pub fn processes(is_one: impl Fn(&[&str]) -> bool) -> Vec<i32> {
    let is_wanted = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        is_one(&line.split('\0').collect::<Vec<_>>())
    };
    let pids = std::fs::read_dir("/proc").expect("/proc").flatten();
    pids.filter_map(|it| it.file_name().to_str()?.parse().ok()).filter(is_wanted).collect()
}

/// The QEMU processes of a lab.
pub fn qemus(lab: &Lab) -> Vec<i32> {
    let wanted = lab.path().display().to_string();
    let mut found = processes(|words| {
        words[0].contains("qemu-system") && words.iter().any(|it| it.contains(&wanted))
    });
    found.retain(|pid| is_alive(*pid));
    found
}

/// A TCP port that nobody has.
pub fn free_port() -> u16 {
    dewar_testkit::free_port().expect("a free port")
}

/// All files under a folder.
pub fn files(root: &std::path::Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        match entry.path() {
            path if path.is_dir() => found.extend(files(&path)),
            path => found.push(path),
        }
    }
    found.sort();
    found
}

/// The guest's RAM as it is now; it must stand still.
pub fn ram_now(lab: &Lab, name: &str) -> Vec<u8> {
    let record = lab.record(name);
    let files = record["ram"].as_array().expect("RAM");
    let bytes = |file: &Value| file["bytes"].as_u64().expect("size") as usize;
    let mut ram = vec![0; files.iter().map(bytes).sum()];
    let mut rest = &mut ram[..];
    for file in files {
        let (region, behind) = rest.split_at_mut(bytes(file));
        let file = File::open(file["path"].as_str().expect("path")).expect("RAM file");
        // Holes are not read: that would take as long as the rest.
        let mut at = 0;
        loop {
            let from = match seek(&file, SeekFrom::Data(at)) {
                Err(Errno::NXIO) => break,
                from => from.expect("data"),
            };
            at = seek(&file, SeekFrom::Hole(from)).expect("the end of the data");
            file.read_exact_at(&mut region[from as usize..at as usize], from).expect("RAM");
        }
        rest = behind;
    }
    ram
}

/// The hash of each page.
pub fn page_hashes(ram: &[u8]) -> Vec<blake3::Hash> {
    ram.chunks(PAGE_BYTES).map(page_hash).collect()
}

/// The hash of a page. Most pages of a test guest are zeros: theirs is known.
fn page_hash(page: &[u8]) -> blake3::Hash {
    static OF_ZEROS: LazyLock<blake3::Hash> = LazyLock::new(|| blake3::hash(&[0; PAGE_BYTES]));
    if page == [0; PAGE_BYTES] { *OF_ZEROS } else { blake3::hash(page) }
}

/// The hash of each page of an image in the default store.
pub fn image_hashes(lab: &Lab, id: &ImageId) -> Vec<blake3::Hash> {
    let store = Store::open(&Location::Folder(lab.store())).expect("store");
    let image = store.open_image(id).expect("image");
    let mut cache = FrameCache::new().expect("cache");
    let entries = image.entries().expect("entries");
    let mut pages: Vec<_> = (0..).map(PageNumber).zip(entries).collect();
    let mut hashes = vec![page_hash(&[0; PAGE_BYTES]); pages.len()];
    // As they lie in the store: each frame is decoded once.
    pages.sort_by_key(|(_, entry)| entry.0);
    for (page, entry) in pages {
        let content = image.page(page, entry, &mut cache).expect("page");
        hashes[page.0 as usize] = page_hash(content.unwrap_or(&[0; PAGE_BYTES]));
    }
    hashes
}

/// Takes a checkpoint of which every page must be as RAM was in the pause;
/// returns what the command told.
pub fn assert_exact(lab: &Lab, guest: &mut TestGuest, load: &str) -> Value {
    assert_exact_with(lab, guest, load, &[])
}

/// The same with more arguments.
pub fn assert_exact_with(lab: &Lab, guest: &mut TestGuest, load: &str, more: &[&str]) -> Value {
    let line = [&["checkpoint", &guest.name], more].concat();
    let held = HeldCheckpoint::at_with(lab, &line, "captured");
    let ram = ram_now(lab, &guest.name);
    let (code, out, said) = held.go_on();
    assert_eq!(code, 0, "{said}");
    let told: Value = serde_json::from_str(&out).expect("JSON");
    let id = ImageId(told["checkpoint"].as_str().expect("id").to_owned());
    let (saved, ram) = (image_hashes(lab, &id), page_hashes(&ram));
    assert_eq!(saved.len(), ram.len());
    let different: Vec<usize> = (0..ram.len()).filter(|page| saved[*page] != ram[*page]).collect();
    assert!(different.is_empty(), "{different:?}: pages that differ under load '{load}'");
    let epochs = told["epochs"].as_array().expect("epochs");
    println!("{load}: {} pages equal, {} epochs", ram.len(), epochs.len());
    guest.console.ask("count").expect("the guest goes on");
    told
}
