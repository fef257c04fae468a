//! Who is admitted, where files are damaged, old, or cannot be written.

use dewar_kernel::{Scheduling, Task};
use dewar_qos::{Entry, Ledger, Owner, Promise, QosError, SavedTask, Seen};
use dewar_testkit::SmallDisk;
use std::fs;
use std::process::{Child, Command};

/// A process that waits.
struct Sleeper(Child);

impl Sleeper {
    fn new() -> Self {
        Self(Command::new("sleep").arg("300").spawn().expect("sleep"))
    }

    fn task(&self) -> Task {
        let pid = self.0.id() as i32;
        Task { process: pid, thread: pid }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An entry of this process as controller.
fn entry(name: &str, guest: &Sleeper) -> Entry {
    let owner = |pid: i32| Owner::of(pid).expect("it is there");
    Entry {
        name: name.to_owned(),
        scope: String::new(),
        process: owner(guest.task().process),
        controller: owner(std::process::id() as i32),
        promise: Promise { rate: 30.0, miss: 0.001, min: 0.05, max: 0.5, threads: 1 },
        law: "demand".to_owned(),
        by: "deadline".to_owned(),
        saved: Vec::new(),
        has_helpers: false,
        group: None,
        limit: None,
        seen: Seen::default(),
    }
}

/// Asking the kernel while somebody is promised something may make it lose count of that.
#[test]
fn what_can_be_promised_is_asked_for_once() {
    let folder = tempfile::tempdir().expect("folder");
    let ledger = Ledger::new(folder.path().join("qos"));
    let (first, second) = (Sleeper::new(), Sleeper::new());
    let mut one = entry("first", &first);
    ledger.admit(&mut one, &[first.task()], false).expect("admitted");
    assert_eq!(one.limit, Some(dewar_kernel::deadline_limit()));
    one.limit = Some(0.75);
    ledger.write(&one).expect("written");
    let refused = ledger.admit(&mut entry("second", &second), &[second.task()], false);
    assert!(matches!(refused, Err(QosError::Full { limit: 0.75, .. })), "{refused:?}");
}

#[test]
fn while_an_entry_cannot_be_read_nobody_is_admitted() {
    let folder = tempfile::tempdir().expect("folder");
    let ledger = Ledger::new(folder.path().join("qos"));
    let (first, second) = (Sleeper::new(), Sleeper::new());
    ledger.admit(&mut entry("first", &first), &[first.task()], false).expect("admitted");
    let path = ledger.folder().join("first.json");
    let whole = fs::read(&path).expect("entry");
    fs::write(&path, &whole[..whole.len() / 2]).expect("damage");
    assert_eq!(ledger.unreadable(), std::slice::from_ref(&path));
    let refused = ledger.admit(&mut entry("second", &second), &[second.task()], false);
    assert!(matches!(&refused, Err(QosError::Unreadable(named)) if *named == path), "{refused:?}");
    assert!(ledger.entry("second").is_none());
    // One that was written before the machine was started means nothing.
    let old = fs::FileTimes::new().set_modified(std::time::SystemTime::UNIX_EPOCH);
    fs::File::options().write(true).open(&path).expect("open").set_times(old).expect("times");
    ledger.admit(&mut entry("second", &second), &[second.task()], false).expect("admitted");
    assert!(!path.exists());
}

#[test]
fn a_full_disk_at_admission_leaves_the_threads_alone() {
    let folder = tempfile::tempdir().expect("folder");
    let small = SmallDisk::mount(&folder.path().join("small"), "64k").expect("small disk");
    let ledger = Ledger::new(small.path().join("qos"));
    let guest = Sleeper::new();
    let before = guest.task().scheduling().expect("scheduling");
    ledger.recover();
    small.fill().expect("full");
    let refused = ledger.admit(&mut entry("g", &guest), &[guest.task()], false);
    assert!(matches!(refused, Err(QosError::File(..))), "{refused:?}");
    assert_eq!(guest.task().scheduling().expect("scheduling"), before);
    assert_eq!(ledger.entries(), []);
    small.free().expect("room");
    ledger.admit(&mut entry("g", &guest), &[guest.task()], false).expect("admitted");
}

#[test]
fn an_entry_from_before_a_restart_touches_no_thread() {
    let folder = tempfile::tempdir().expect("folder");
    let ledger = Ledger::new(folder.path().join("qos"));
    let guest = Sleeper::new();
    let mut old = entry("old", &guest);
    ledger.admit(&mut old, &[guest.task()], false).expect("admitted");
    let raised = Scheduling::ordinary(-3);
    guest.task().schedule(raised).expect("schedule");
    // As if its thread had the same number and the same age in another run.
    let mut text: serde_json::Value = serde_json::to_value(&old).expect("JSON");
    text["controller"]["boot"] = 1.into();
    fs::write(ledger.folder().join("old.json"), text.to_string()).expect("write");
    assert_eq!(ledger.recover(), ["old"]);
    assert_eq!(guest.task().scheduling().expect("scheduling"), raised, "it was not touched");
    // In this run one whose controller is dead gets its threads back.
    text["controller"] = serde_json::to_value(dead_process()).expect("JSON");
    fs::write(ledger.folder().join("old.json"), text.to_string()).expect("write");
    assert_eq!(ledger.recover(), ["old"]);
    assert_eq!(guest.task().scheduling().expect("scheduling"), Scheduling::ordinary(0));
}

fn dead_process() -> Owner {
    Owner::of(Sleeper::new().task().process).expect("it is there")
}

#[test]
fn a_place_that_was_kept_is_given_to_nobody_else() {
    let folder = tempfile::tempdir().expect("folder");
    let ledger = Ledger::new(folder.path().join("qos"));
    let limit = dewar_kernel::deadline_limit();
    let half = |name: &str, guest: &Sleeper| {
        let mut entry = entry(name, guest);
        entry.promise.max = limit * 0.6;
        entry
    };
    let (guest, next, other) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
    ledger.admit(&mut half("g", &guest), &[guest.task()], false).expect("admitted");
    drop(guest);
    let refused = ledger.admit(&mut half("other", &other), &[other.task()], false);
    assert!(matches!(refused, Err(QosError::Full { .. })), "{refused:?}");
    // The same controller, for the same guest in its next process.
    ledger.admit(&mut half("g", &next), &[next.task()], false).expect("its own place");
    // Another controller is refused.
    let mut foreign = half("g", &next);
    foreign.controller.started += 1;
    let refused = ledger.admit(&mut foreign, &[next.task()], false);
    assert!(matches!(refused, Err(QosError::Held(_))), "{refused:?}");
}

#[test]
fn a_thread_that_ended_is_told_from_one_that_is_there() {
    let own_task = || Task {
        process: std::process::id() as i32,
        thread: rustix::thread::gettid().as_raw_nonzero().get(),
    };
    let here = SavedTask::of(own_task()).expect("this thread");
    let there = std::thread::spawn(move || SavedTask::of(own_task()).expect("that thread"));
    let there = there.join().expect("it ends");
    assert!(!here.has_ended());
    // The kernel may take a moment.
    let began = std::time::Instant::now();
    while !there.has_ended() && began.elapsed() < std::time::Duration::from_secs(5) {
        std::thread::yield_now();
    }
    assert!(there.has_ended());
}
