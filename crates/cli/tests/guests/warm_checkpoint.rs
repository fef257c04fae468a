//! Checkpoints, restores and freezes into a store of guests whose disks Dewar serves.

use crate::common::{HeldCheckpoint, assert_exact};
use crate::served_guest::{Warm, is_warm, ours};
use dewar_testkit::{kill, wait_until};
use rustix::process::Signal;
use std::time::Duration;

fn write(warm: &mut Warm, blocks: u32) {
    warm.ask(&format!("run dd if=/dev/urandom of=/mnt/written bs=64k count={blocks} conv=fsync"));
}

#[test]
fn a_guest_comes_back_with_its_served_disk_and_is_warm_again() {
    let mut warm = Warm::new("cache=warm,cache-size=100M");
    write(&mut warm, 8);
    let before = warm.read("written");
    let image = warm.lab.dewar(&["checkpoint", "g"]).done().json();
    assert_eq!(image["disks"], 1, "{image}");
    let beside = warm.disk.with_extension("raw.dewar-overlay");
    assert!(!beside.exists(), "what was written meanwhile is in its own file again");
    write(&mut warm, 4);
    warm.lab.dewar(&["stop", "g", "--now"]).done();
    let unchanged = std::fs::read(&warm.disk).expect("disk");
    for how in [&["restore", "g"][..], &["restore", "g", "--replace", "--eager"]] {
        warm.lab.dewar(how).done();
        warm.is_again();
        assert_eq!(warm.read("written"), before, "{how:?}");
        let told = warm.told();
        assert_eq!(told["disks"][0]["id"], "disk0", "{told}");
        let sums = warm.sums.clone();
        assert_eq!(warm.read_all(), sums);
        write(&mut warm, 2);
    }
    // What it has of its disk in memory now it read before the checkpoint, but for what it writes and reads from here on.
    warm.ask("run busybox umount /mnt");
    warm.mount();
    let sums = warm.read_all();
    assert_eq!(sums, warm.sums);
    let shown = warm.lab.dewar(&["inspect", "g"]).done();
    assert!(shown.json()["served_disks"].is_object());
    let folder = warm.lab.root().join("guests/g");
    let served = std::fs::read_to_string(folder.join("served-disks.json")).expect("file");
    assert!(served.contains("disk-0.qcow2") && served.contains("104857600"), "{served}");
    write(&mut warm, 3);
    let last = warm.read("written");
    warm.reboot();
    assert_eq!(warm.read("written"), last);
    assert_eq!(warm.read_all(), sums);
    // Who wrote what: the file that it began with is as the checkpoint left it.
    assert!(std::fs::read(&warm.disk).expect("disk") == unchanged);
}

#[test]
fn an_incremental_over_a_reboot_is_exact() {
    let mut warm = Warm::new("cache=warm");
    assert_exact(&warm.lab, &mut warm.guest, "first");
    warm.reboot();
    let told = assert_exact(&warm.lab, &mut warm.guest, "rebooted");
    // Its memory is another one, of which nothing was tracked.
    assert_eq!(told["tracked"], false, "{told}");
    assert!(told["parent"].is_string(), "{told}");
    let told = assert_exact(&warm.lab, &mut warm.guest, "after");
    assert_eq!(told["tracked"], true, "{told}");
    is_warm(&mut warm, 1);
}

#[test]
fn a_reset_while_a_checkpoint_is_taken_harms_neither() {
    let mut warm = Warm::new("cache=warm");
    warm.ask("check 2000 1 disk");
    let held = HeldCheckpoint::at(&warm.lab, "g", "resumed");
    // Its disk has the overlay on top. The reset is done without setting memory aside.
    warm.reboot();
    let sums = warm.sums.clone();
    assert_eq!(warm.read_all(), sums);
    write(&mut warm, 4);
    let last = warm.read("written");
    let (code, _, said) = held.go_on();
    assert_eq!(code, 0, "{said}");
    assert_eq!(warm.read("written"), last);
    assert!(warm.told()["last_reset"]["cold"].is_string(), "{}", warm.told());
    assert_exact(&warm.lab, &mut warm.guest, "the next one");
    // In the checkpoint it had not written that yet.
    let first = warm.lab.dewar(&["ls"]).json()["checkpoints"][0]["checkpoint"].clone();
    let first = first.as_str().expect("id");
    warm.lab.dewar(&["restore", first, "--replace"]).done();
    warm.is_again();
    assert!(warm.guest.console.ask("sum /mnt/written").is_err());
    assert_eq!(warm.read_all(), sums);
}

#[test]
fn what_was_written_over_a_checkpoint_that_died_with_all_else_is_in_the_file() {
    let mut warm = Warm::new("cache=warm");
    let held = HeldCheckpoint::at(&warm.lab, "g", "resumed");
    write(&mut warm, 16);
    let last = warm.read("written");
    let process = warm.lab.pid("g").expect("pid");
    // Nobody is left who knows of it but the files: what was written lies in the overlay.
    held.kill();
    kill(process, Signal::KILL);
    wait_until("the guest to be ended", Duration::from_secs(30), || {
        warm.lab.ps("g").is_some_and(|it| it["state"] == "ended")
    });
    assert!(ours(&warm.lab, "__disks").is_empty() && ours(&warm.lab, "__disk-server").is_empty());
    assert!(!warm.disk.with_extension("raw.dewar-overlay").exists());
    warm.run_again();
    assert_eq!(warm.read("written"), last);
    let sums = warm.sums.clone();
    assert_eq!(warm.read_all(), sums);
}

#[test]
fn one_that_is_frozen_into_a_store_is_thawed_with_its_disk() {
    let mut warm = Warm::new("cache=warm");
    write(&mut warm, 8);
    let before = warm.read("written");
    warm.lab.dewar(&["freeze", "g", "--to-store"]).done();
    wait_until("the end of ours", Duration::from_secs(20), || {
        ours(&warm.lab, "__disks").is_empty() && ours(&warm.lab, "__disk-server").is_empty()
    });
    warm.lab.dewar(&["thaw", "g"]).done();
    warm.is_again();
    assert_eq!(warm.read("written"), before);
    let sums = warm.sums.clone();
    assert_eq!(warm.read_all(), sums);
    warm.reboot();
    assert_eq!(warm.read_all(), sums);
    assert_eq!(warm.searched(1)["last_reset"]["cold"], serde_json::Value::Null);
}
