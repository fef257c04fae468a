//! The guest's own relation among all its pages and its disk holds after every
//! restore, and it goes on.

use crate::common;
use dewar_testkit::{DiskSpec, GuestSpec, rounds, wait_until};
use std::time::Duration;

#[test]
#[ignore = "long: make test-long"]
fn ten_checkpoints_under_load_each_restored() {
    let rounds = rounds("checkpoints under load", 10, 2);
    let lab = common::lab();
    let spec = GuestSpec { memory_mib: 256, vcpus: 2, ..GuestSpec::default() };
    let mut guest = lab.run("busy", &spec).expect("guest");
    guest.console.ask("check 12000 2 disk").expect("check");
    let mut steps = Vec::new();
    for number in 0..rounds {
        let tag = format!("t{number}");
        lab.dewar(&["checkpoint", "busy", "--tag", &tag]).done();
        steps.push(guest.console.ask_number("verify").expect("the guest runs on, consistent"));
    }
    for number in 0..rounds {
        lab.crash("busy");
        let mode: &[&str] = if number % 2 == 0 { &[] } else { &["--eager"] };
        let tag = format!("t{number}");
        lab.restore(&mut guest, &[&[tag.as_str()], mode].concat()).expect("restore");
        let now = guest.console.ask_number("verify").expect("consistent after restore");
        assert!(now > 0);
        if number > 0 {
            assert!(now > steps[number - 1], "checkpoint {number} is later than the one before");
        }
        let later = guest.console.ask_number("verify").expect("consistent, later");
        assert!(later > now, "the guest goes on");
    }
    lab.dewar(&["verify", &format!("t{}", rounds - 1)]).done();
}

#[test]
fn a_file_system_and_its_cache_are_of_one_instant() {
    let lab = common::lab();
    let disk = |format| DiskSpec { format, file_system: true, ..DiskSpec::default() };
    let disks = vec![disk("qcow2"), disk("raw")];
    let spec = GuestSpec { disks, vcpus: 2, ..GuestSpec::default() };
    let mut guest = lab.run("files", &spec).expect("guest");
    for round in 0..rounds("restores of a file system", 4, 2) {
        if round == 0 {
            guest.console.ask("files /dev/vda").expect("files");
        }
        std::thread::sleep(std::time::Duration::from_millis(500));
        lab.dewar(&["checkpoint", "files"]).done();
        let before = guest.console.ask_number("verify").expect("consistent");
        lab.crash("files");
        let mode: &[&str] = if round % 2 == 0 { &[] } else { &["--eager"] };
        lab.restore(&mut guest, &[&["files"], mode].concat()).expect("restore");
        let after = guest.console.ask_number("verify").expect("consistent after restore");
        println!("round {round}: {before} steps, {after} after the restore");
        wait_until("it to go on", Duration::from_secs(20), || {
            guest.console.ask_number("verify").expect("later") > after
        });
    }
}

#[test]
fn a_restored_guest_is_checkpointed_and_restored_again() {
    let lab = common::lab();
    let raw = DiskSpec { format: "raw", ..DiskSpec::default() };
    let spec = GuestSpec { disks: vec![raw, DiskSpec::default()], ..GuestSpec::default() };
    let mut guest = lab.run("chain", &spec).expect("guest");
    guest.console.ask("check 8000 1 disk").expect("check");
    let mut before = 0;
    for generation in 0..rounds("generations of a guest", 4, 3) {
        lab.dewar(&["checkpoint", "chain"]).done();
        lab.crash("chain");
        lab.restore(&mut guest, &["chain"]).expect("restore");
        let steps = guest.console.ask_number("verify").expect("consistent");
        assert!(steps >= before, "generation {generation} went back");
        before = steps;
    }
}

#[test]
fn a_paused_guest_is_saved_and_stays_paused() {
    let lab = common::lab();
    let mut guest = lab.run("still", &GuestSpec::default()).expect("guest");
    guest.console.ask("check 8000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "still", "--tag", "a"]).done();
    lab.crash("still");
    lab.restore(&mut guest, &["a", "--paused"]).expect("restore");
    assert_eq!(lab.ps("still").expect("listed")["state"], "paused");
    lab.dewar(&["checkpoint", "still", "--tag", "b"]).done();
    assert_eq!(lab.ps("still").expect("listed")["state"], "paused");
    // QEMU saves a state only once until the guest runs; nothing has changed.
    lab.dewar(&["checkpoint", "still"]).failed(4, &["still exact", "paused"]);
    lab.crash("still");
    // It comes back as it was, and runs where it is told to.
    lab.restore(&mut guest, &["b"]).expect("restore");
    assert_eq!(lab.ps("still").expect("listed")["state"], "paused");
    lab.restore(&mut guest, &["b", "--replace", "--run"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}

/// What `make test-kvm` runs under real KVM, with 1 and 2 vCPUs.
#[test]
fn under_kvm() {
    if std::env::var("DEWAR_TEST_ACCEL").is_err() {
        println!("SKIPPED under_kvm: it runs in 'make test-kvm'");
        return;
    }
    for vcpus in [1, 2] {
        let lab = common::lab();
        let spec = GuestSpec { memory_mib: 192, vcpus, ..GuestSpec::default() };
        let mut guest = lab.run("nested", &spec).expect("guest");
        guest.console.ask(&format!("check 4000 {vcpus} disk")).expect("check");
        for number in 0..3 {
            let told = lab.dewar(&["checkpoint", "nested"]).done().json();
            println!(
                "{vcpus} vCPUs: pause {} ms, {} epochs",
                told["pause_ms"],
                told["epochs"].as_array().map_or(0, Vec::len)
            );
            guest.console.ask("verify").expect("the guest runs on, consistent");
            lab.crash("nested");
            let mode: &[&str] = if number % 2 == 0 { &[] } else { &["--eager"] };
            lab.restore(&mut guest, &[&["nested"], mode].concat()).expect("restore");
            guest.console.ask("verify").expect("consistent after restore");
        }
    }
}
