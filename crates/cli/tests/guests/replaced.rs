//! The dead guest that a restore or a `run` takes the place of: while the new one has not
//! run, nothing of it is lost.

use crate::common::{self, HeldCheckpoint};
use dewar_testkit::{GuestSpec, Lab, SmallDisk, TestGuest, qemu};
use std::fs;
use std::path::PathBuf;

/// A guest that was restored from checkpoint `first`, has run, and has crashed; and its
/// overlay, which has what it wrote since.
fn dead_guest(lab: &Lab) -> (TestGuest, PathBuf, Vec<u8>) {
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "g", "--tag", "first"]).done();
    lab.crash("g");
    lab.restore(&mut guest, &["first"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    lab.wait_for_memory("g");
    lab.dewar(&["checkpoint", "g", "--tag", "second"]).done();
    lab.crash("g");
    let overlay = lab.root().join("guests/g/disk-0.qcow2");
    let content = fs::read(&overlay).expect("overlay");
    (guest, overlay, content)
}

/// A restore that finds no room for RAM.
fn fails(lab: &Lab) {
    let small = SmallDisk::mount(&lab.path().join("small"), "8m").expect("small disk");
    let folder = small.path().display().to_string();
    lab.dewar(&["restore", "second", "--ram-dir", &folder])
        .failed(4, &["no room", "no guest was started"]);
}

fn left_over(lab: &Lab) -> Vec<PathBuf> {
    let mut left = common::files(&lab.root().join("guests/g"));
    let is_left = |path: &PathBuf| {
        path.ends_with("replaced.json") || path.extension() == Some("old".as_ref())
    };
    left.retain(is_left);
    left
}

#[test]
fn a_restore_that_fails_leaves_the_dead_guests_disk() {
    let lab = common::lab();
    let (mut guest, overlay, content) = dead_guest(&lab);
    fails(&lab);
    assert!(fs::read(&overlay).expect("overlay") == content, "the disk is as it was");
    assert_eq!(lab.ps("g").expect("listed")["state"], "ended");
    lab.restore(&mut guest, &["first"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    assert_eq!(left_over(&lab), Vec::<PathBuf>::new());
}

#[test]
fn a_restore_that_was_killed_gives_the_dead_guest_its_disk_back() {
    let lab = common::lab();
    let (_guest, overlay, content) = dead_guest(&lab);
    let all = lab.dewar(&["ls"]).done().json();
    let mut all = all["checkpoints"].as_array().expect("list").iter();
    let first = all.find(|it| it["tag"] == "first").expect("first")["checkpoint"].clone();
    let first = first.as_str().expect("id");
    let record = lab.store().join(format!("images/{first}.json"));
    let aside = lab.path().join("record");
    for step in ["starting QEMU", "starting the page server", "loading the devices"] {
        HeldCheckpoint::at_with(&lab, &["restore", "second"], step).kill();
        let state = lab.ps("g").expect("listed")["state"].clone();
        assert!(state == "ended" || state == "unfinished", "{step}: {state}");
        // It may yet need what its disk stood on.
        lab.dewar(&["delete", "first"]).failed(1, &["still stands on"]);
        fs::rename(&record, &aside).expect("rename");
        lab.dewar(&["gc"]).failed(1, &["whose record is gone"]);
        fs::rename(&aside, &record).expect("rename");
        // Twice: the first of them puts it back, the second replaces it.
        for _ in 0..2 {
            fails(&lab);
            assert!(fs::read(&overlay).expect("overlay") == content, "the disk after {step}");
            assert_eq!(lab.ps("g").expect("listed")["state"], "ended", "{step}");
            assert_eq!(left_over(&lab), Vec::<PathBuf>::new(), "{step}");
        }
    }
}

/// The restore dies when its guest may run: from then on that one's disk is the newest.
#[test]
fn an_old_disk_does_not_come_back_for_a_newer_one() {
    let lab = common::lab();
    let (mut guest, overlay, before) = dead_guest(&lab);
    HeldCheckpoint::at_with(&lab, &["restore", "second"], "loaded").kill();
    assert_eq!(lab.ps("g").expect("listed")["state"], "running");
    assert_eq!(left_over(&lab), Vec::<PathBuf>::new());
    guest.console =
        dewar_testkit::Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
    lab.crash("g");
    let content = fs::read(&overlay).expect("overlay");
    assert!(content != before);
    fails(&lab);
    assert!(fs::read(&overlay).expect("overlay") == content);
}

/// What is refused only when QEMU was asked leaves the guest on record that had the name.
#[test]
#[ignore = "long: make test-long"]
fn a_run_that_is_refused_forgets_nobody() {
    let lab = common::lab();
    let (mut guest, overlay, content) = dead_guest(&lab);
    let drive = format!("if=none,id=v,format=raw,file=fat:rw:{}", lab.path().display());
    let line = ["run", "g", "--", &qemu(), "-display", "none", "-m", "64M", "-drive", &drive];
    lab.dewar(&line).failed(4, &["QEMU cannot save its state", "vvfat"]);
    assert_eq!(lab.ps("g").expect("listed")["state"], "ended");
    lab.dewar(&["delete", "first"]).failed(1, &["still stands on"]);
    assert!(fs::read(&overlay).expect("overlay") == content);
    lab.restore(&mut guest, &["second"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}
