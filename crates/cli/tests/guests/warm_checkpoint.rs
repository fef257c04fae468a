//! Checkpoints, restores, freezes into a store and moves of guests whose disks Dewar serves.

use crate::common::{self, HeldCheckpoint, assert_exact};
use crate::migrate::{Hosts, words};
use crate::served_guest::{Warm, is_warm, ours};
use dewar_testkit::{GuestSpec, kill, wait_until};
use rustix::process::Signal;
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

fn write(warm: &mut Warm, blocks: u32) {
    warm.ask(&format!("run dd if=/dev/urandom of=/mnt/written bs=64k count={blocks} conv=fsync"));
}

#[test]
#[ignore = "long: make test-long"]
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
#[ignore = "long: make test-long"]
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
#[ignore = "long: make test-long"]
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
    wait_until("the end of ours", Duration::from_secs(20), || {
        ours(&warm.lab, "__disks").is_empty() && ours(&warm.lab, "__disk-server").is_empty()
    });
    assert!(!warm.disk.with_extension("raw.dewar-overlay").exists());
    warm.run_again();
    assert_eq!(warm.read("written"), last);
    let sums = warm.sums.clone();
    assert_eq!(warm.read_all(), sums);
}

#[test]
#[ignore = "long: make test-long"]
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

/// A guest that writes its served disk, and knows what must be in it. Both hosts reach the file.
fn writer() -> (Hosts, PathBuf) {
    let a = common::lab().as_host().expect("first host");
    let disk = a.path().join("shared.raw");
    File::create(&disk).and_then(|it| it.set_len(64 << 20)).expect("disk");
    let served = vec![format!("{},cache=warm", disk.display())];
    let hosts = Hosts::with(a, &GuestSpec { disks: Vec::new(), served, ..GuestSpec::default() });
    (hosts, disk)
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_moves_and_its_disk_is_qemus_own_there() {
    let (mut hosts, disk) = writer();
    hosts.guest.console.ask("check 1000 1 disk").expect("check");
    // The other host was about to load it, and nobody had its disk: it stays, and has it again.
    hosts.killed_at("loading the devices", &[]).failed(1, &[]);
    assert!(!hosts.assert_on_one("it stays"));
    let other = ["run", "h", "--disk", &disk.display().to_string(), "--", "qemu-system-x86_64"];
    wait_until("the lock to be taken again", Duration::from_secs(10), || {
        let ran = hosts.a.dewar(&other);
        if ran.code == 0 {
            // It came between; the guest's write would have failed.
            panic!("two have the disk");
        }
        ran.stderr.contains("in use by another program")
    });
    let moved = Hosts::migrate(&hosts.a, &hosts.b, &["--max-downtime", "1s"]).done();
    assert!(moved.stderr.contains("QEMU's own at the other host"), "{}", moved.stderr);
    assert!(hosts.assert_on_one("moved"));
    assert!(hosts.b.dewar(&["inspect", "g"]).done().json()["served_disks"].is_null());
    wait_until("the end of ours", Duration::from_secs(20), || {
        ours(&hosts.a, "__disks").is_empty() && ours(&hosts.a, "__disk-server").is_empty()
    });
    hosts.bring_back("moved back");
}

#[test]
fn a_served_disk_is_copied_to_a_host_that_has_none_of_it() {
    let (mut hosts, disk) = writer();
    hosts.guest.console.ask("check 1000 1 disk").expect("check");
    let there = disk.with_file_name("copy.qcow2");
    let map = format!("{}={}", disk.display(), there.display());
    let how = ["--with-disks", "--disk-map", &map, "--max-downtime", "2s"];
    Hosts::migrate(&hosts.a, &hosts.b, &how).done();
    assert!(hosts.assert_on_one("copied"));
    let line = hosts.b.dewar(&["inspect", "g"]).done().stdout;
    assert!(line.contains("copy.qcow2") && !line.contains("shared.raw"), "{line}");
}

/// The guest is reset while it is about to move, or to be frozen: it is not taken as one that stands still.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_is_just_being_reset_is_neither_moved_nor_frozen() {
    let (mut hosts, _) = writer();
    let line = Hosts::line(&hosts.b, &["--max-downtime", "1s"]);
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line), "sending changes");
    is_refused_at_its_reset(&mut hosts, held);
    hosts.guest.console.ask("check 1000 1 none").expect("check");
    assert!(!hosts.assert_on_one("it was reset"));
    std::thread::sleep(Duration::from_secs(4));
    let freeze = hosts.a.command(&["freeze", "g"]);
    let held = HeldCheckpoint::at_command(freeze, "stopping the guest");
    is_refused_at_its_reset(&mut hosts, held);
}

/// The guest is reset under a command that stands still. That fails when it goes on, and the guest boots.
fn is_refused_at_its_reset(hosts: &mut Hosts, command: HeldCheckpoint) {
    hosts.guest.console.send("spawn reboot -f").expect("reboot");
    wait_until("it to be held", Duration::from_secs(60), || {
        hosts.a.root().join("guests/g/resetting.json").exists()
    });
    let (code, _, said) = command.go_on();
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("just being reset"), "{said}");
    hosts.guest.console.wait_ready(Duration::from_secs(60)).expect("it boots");
}

/// What was said of a disk stays so where a guest cannot be thawed.
#[test]
#[ignore = "long: make test-long"]
fn a_thaw_that_fails_leaves_what_was_said_of_the_disk() {
    let mut warm = Warm::new("cache=off,cache-size=40M");
    let sums = warm.sums.clone();
    warm.lab.dewar(&["freeze", "g"]).done();
    // Another has its disk.
    let disk = File::options().read(true).write(true).open(&warm.disk).expect("disk");
    dewar_kernel::lock_byte(&disk, 201).expect("lock");
    warm.lab.dewar(&["thaw", "g"]).failed(1, &["in use by another program"]);
    drop(disk);
    warm.lab.dewar(&["thaw", "g"]).done();
    let told = warm.told()["disks"][0].clone();
    assert_eq!((&told["is_warm"], &told["cache_bytes"]), (&false.into(), &(40 << 20).into()));
    warm.is_again();
    assert_eq!(warm.read_all(), sums);
}
