//! Disk copies that hold only what was written since the checkpoint before.

use crate::common::{self, HeldCheckpoint};
use dewar_guest_qemu::Qmp;
use dewar_testkit::{DiskSpec, GuestSpec, Lab, RedisServer, TestGuest, sample};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

fn idle_guest(lab: &Lab) -> TestGuest {
    let raw = DiskSpec { format: "raw", ..DiskSpec::default() };
    let disks = vec![DiskSpec::default(), raw];
    lab.run("g", &GuestSpec { disks, ..GuestSpec::default() }).expect("guest")
}

fn guest(lab: &Lab) -> TestGuest {
    let mut guest = idle_guest(lab);
    guest.console.ask("check 2000 1 disk").expect("check");
    guest
}

/// Does something to a disk as its device would.
fn qemu_io(lab: &Lab, disk: usize, what: &str) {
    let mut qmp = Qmp::connect(&lab.root().join("guests/g/qmp.sock")).expect("QMP");
    let line =
        format!("qemu-io -d /machine/peripheral-anon/device[{disk}]/virtio-backend \"{what}\"");
    let told = qmp.execute("human-monitor-command", json!({"command-line": line})).expect("HMP");
    assert!(!told.to_string().to_lowercase().contains("error"), "{line}: {told}");
}

fn same(saved: &Path, format: &str, own: &Path) -> bool {
    Command::new("qemu-img")
        .args(["compare", "-q", "-U", "-f", "qcow2", "-F", format])
        .arg(saved)
        .arg(own)
        .status()
        .expect("qemu-img")
        .success()
}

/// Takes a checkpoint whose disk copies must be the disks as they stand frozen;
/// returns its id and the lengths of its own files.
fn assert_exact(lab: &Lab, guest: &TestGuest, when: &str) -> (String, Vec<u64>) {
    let before = common::files(&lab.store().join("disks"));
    let held = HeldCheckpoint::at(lab, "g", "disks-copied");
    let mut made = common::files(&lab.store().join("disks"));
    made.retain(|file| !before.contains(file));
    assert_eq!(made.len(), 2);
    for (file, format) in made.iter().zip(["qcow2", "raw"]) {
        let number = usize::from(format == "raw");
        let own = guest.folder.join(format!("disk{number}.{format}"));
        assert!(same(file, format, &own), "{when}: {}", file.display());
    }
    let sizes = made.iter().map(|file| file.metadata().expect("stat").len()).collect();
    let (code, out, said) = held.go_on();
    assert_eq!(code, 0, "{said}");
    let told: Value = serde_json::from_str(&out).expect("JSON");
    (told["checkpoint"].as_str().expect("id").to_owned(), sizes)
}

#[test]
fn each_copy_holds_what_changed_and_is_exact() {
    let lab = common::lab();
    let mut guest = guest(&lab);
    for disk in 0..2 {
        qemu_io(&lab, disk, "write -P 90 40M 20M");
    }
    let (first, whole) = assert_exact(&lab, &guest, "first");
    assert!(whole.iter().all(|bytes| *bytes > 20 << 20), "{whole:?}");
    let (_, little) = assert_exact(&lab, &guest, "little");
    assert!(little.iter().all(|bytes| *bytes < 8 << 20), "{little:?}");
    for disk in 0..2 {
        // What became zeros must hide what was there before.
        qemu_io(&lab, disk, "write -z 40M 1M");
        qemu_io(&lab, disk, "write -z -u 42M 1M");
        qemu_io(&lab, disk, "discard 44M 1M");
        qemu_io(&lab, disk, "write -P 0 46M 1M");
        qemu_io(&lab, disk, "write -P 17 50331136 1k");
    }
    let (third, few) = assert_exact(&lab, &guest, "zeros");
    assert!(few.iter().all(|bytes| *bytes < 10 << 20), "{few:?}");
    lab.dewar(&["delete", &first]).done();
    lab.dewar(&["verify", &third]).done();
    guest.console.ask("verify").expect("consistent");
    lab.crash("g");
    lab.restore(&mut guest, &[&third]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    // Another QEMU: nothing is known of its disks.
    let told = lab.dewar(&["checkpoint", "g"]).done().json();
    let id = told["checkpoint"].as_str().expect("id");
    let own = lab.store().join(format!("disks/{id}-0.qcow2"));
    assert!(own.metadata().expect("stat").len() > 15 << 20);
}

/// What is in Redis holds no more, and is brought back with what it stands on.
#[test]
#[ignore = "long: make test-long"]
fn copies_in_redis_hold_what_changed_and_are_exact() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    let url = server.url();
    let mut guest = idle_guest(&lab);
    let bytes = |image: &str, disk: usize| -> u64 {
        let key = |piece: u64| format!("dewar:disks/{image}-{disk}.qcow2/{piece:08x}");
        let pieces = (0..).map(|piece| server.ask(&["strlen", &key(piece)]).expect("strlen"));
        pieces.map(|it| it.parse::<u64>().expect("bytes")).take_while(|it| *it > 0).sum()
    };
    let both = |image: &str| [bytes(image, 0), bytes(image, 1)];
    let take = || {
        let told = lab.dewar(&["checkpoint", "g", "--store", &url]).done().json();
        told["checkpoint"].as_str().expect("id").to_owned()
    };
    let write = |what: &str| (0..2).for_each(|disk| qemu_io(&lab, disk, what));
    write("write -P 90 40M 20M");
    let first = take();
    write("write -P 17 50M 1M");
    let second = take();
    write("write -z 40M 1M");
    let third = take();
    assert!(both(&first).iter().all(|bytes| *bytes > 20 << 20), "{:?}", both(&first));
    for image in [&second, &third] {
        assert!(both(image).iter().all(|bytes| *bytes < 4 << 20), "{:?}", both(image));
    }
    lab.dewar(&["delete", &first, "--store", &url]).done();
    lab.dewar(&["gc", "--store", &url]).done();
    lab.dewar(&["verify", &third, "--store", &url]).done();
    lab.crash("g");
    lab.restore(&mut guest, &[&third, "--store", &url]).expect("restore");
    for (disk, format) in ["qcow2", "raw"].into_iter().enumerate() {
        let saved = lab.root().join(format!("guests/g/base/{third}-{disk}.qcow2"));
        let own = guest.folder.join(format!("disk{disk}.{format}"));
        assert!(same(&saved, format, &own), "{}", saved.display());
    }
    // What another checkpoint stood on goes with its guest's next restore.
    lab.wait_for_memory("g");
    lab.crash("g");
    lab.restore(&mut guest, &[&second, "--store", &url]).expect("restore");
    let bases = common::files(&lab.root().join("guests/g/base"));
    assert!(bases.len() == 4 && !bases.iter().any(|it| it.to_string_lossy().contains(&third)));
    // One that lacks what it stands on is not restored.
    let below = format!("dewar:disks/{first}-0.qcow2/00000001");
    assert_eq!(server.ask(&["del", &below]).expect("del"), "1");
    lab.dewar(&["verify", &third, "--store", &url]).failed(1, &["is missing"]);
    lab.dewar(&["restore", &third, "--as", "h", "--store", &url]).failed(1, &["is missing"]);
    assert!(!lab.root().join("guests/h").exists());
    for image in [&second, &third] {
        lab.wait_for_memory("g");
        lab.dewar(&["delete", image, "--store", &url]).done();
    }
    assert_eq!(server.ask(&["keys", "dewar:disks/*"]).expect("keys"), "");
}

#[test]
fn a_failed_checkpoint_loses_no_write() {
    let lab = common::lab();
    let guest = guest(&lab);
    assert_exact(&lab, &guest, "first");
    let all = ["armed", "stopped", "resumed", "disks-copied", "disks-current", "synced"];
    for step in sample("steps of a checkpoint with disks", all.to_vec(), 3) {
        qemu_io(&lab, 1, "write -P 33 30M 64k");
        // The guest itself writes on, to the overlay.
        let held = HeldCheckpoint::at(&lab, "g", step);
        let guardian = held.guardian().expect("a guardian");
        held.kill();
        dewar_testkit::wait_while_alive(guardian);
        assert_exact(&lab, &guest, &format!("after one killed at {step}"));
    }
}

#[test]
#[ignore = "long: make test-long"]
fn chains_stay_short_and_go_with_their_last_image() {
    let lab = common::lab();
    let mut guest = guest(&lab);
    qemu_io(&lab, 0, "write -P 90 16M 40M");
    let mut images = Vec::new();
    let mut wholes = 0;
    for _ in 0..20 {
        let told = lab.dewar(&["checkpoint", "g"]).done().json();
        images.push(told["checkpoint"].as_str().expect("id").to_owned());
        let newest = lab.store().join(format!("disks/{}-0.qcow2", images[images.len() - 1]));
        wholes += usize::from(newest.metadata().expect("stat").len() > 40 << 20);
    }
    assert!((2..5).contains(&wholes), "{wholes} whole copies");
    let last = images.pop().expect("an image");
    for image in images {
        lab.dewar(&["delete", &image]).done();
    }
    lab.dewar(&["verify", &last]).done();
    lab.crash("g");
    lab.restore(&mut guest, &[&last]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    lab.dewar(&["rm", "g", "--force"]).done();
    lab.dewar(&["delete", &last]).done();
    assert_eq!(common::files(&lab.store().join("disks")).len(), 0);
}
