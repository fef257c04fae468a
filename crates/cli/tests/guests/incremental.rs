//! Checkpoints on top of earlier ones: as exact as full ones, at the price of
//! what changed, whatever happened to the tracking or to the images before.

use crate::common::{self, HeldCheckpoint, assert_exact};
use dewar_kernel::{Pid, ProcessHandle, known_userfaultfd_of};
use dewar_testkit::{GuestSpec, Lab, TestGuest, rounds, sample};
use serde_json::Value;

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("a number: {value}"))
}

fn id(told: &Value) -> String {
    told["checkpoint"].as_str().expect("id").to_owned()
}

/// A guest with 64 MiB that it leaves alone.
fn guest(lab: &Lab, name: &str) -> TestGuest {
    let spec = GuestSpec { memory_mib: 256, vcpus: 2, ..GuestSpec::default() };
    let mut guest = lab.run(name, &spec).expect("guest");
    guest.console.ask("fill 64 noise").expect("fill");
    guest
}

#[test]
fn each_costs_what_changed_and_is_exact() {
    let lab = common::lab();
    let mut guest = guest(&lab, "g");
    let first = assert_exact(&lab, &mut guest, "first");
    assert_eq!(first["parent"], Value::Null);
    let idle = assert_exact(&lab, &mut guest, "idle");
    assert_eq!(idle["parent"], first["checkpoint"]);
    assert_eq!((&first["tracked"], &idle["tracked"]), (&false.into(), &true.into()));
    assert!(number(&idle["stored_bytes"]) < number(&first["stored_bytes"]) / 20, "{idle}");
    assert!(number(&idle["pages"]["unchanged"]) > 16_000, "{idle}");
    let listed = lab.dewar(&["ls"]).json()["checkpoints"][1].clone();
    assert_eq!(listed["shared_bytes"], idle["shared_bytes"]);
    assert!(number(&idle["shared_bytes"]) > 64 << 20, "{idle}");
    let told = lab.dewar(&["diff", &id(&first), &id(&idle)]).done().json();
    assert!((1..3000).contains(&number(&told["changed"])), "{told}");
    assert_eq!(told["regions"][0]["changed"], told["changed"]);
    guest.console.ask("check 12000 2 disk hard").expect("check");
    for round in 0..rounds("exact checkpoints on one another", 4, 2) {
        let told = assert_exact(&lab, &mut guest, &format!("violent {round}"));
        // The 64 MiB are never stored again.
        assert!(number(&told["pages"]["unchanged"]) > 16_000, "{told}");
    }
    let full = lab.dewar(&["checkpoint", "g", "--full"]).done().json();
    assert_eq!(full["pages"]["unchanged"], 0);
    assert_eq!(full["parent"], Value::Null);
    guest.console.ask("verify").expect("consistent");
}

#[test]
fn one_whose_page_table_is_damaged_is_nothing_to_begin_with() {
    let lab = common::lab();
    let mut guest = guest(&lab, "g");
    lab.dewar(&["checkpoint", "g"]).done();
    for segment in std::fs::read_dir(lab.root().join("store/segments")).expect("segments") {
        let path = segment.expect("a segment").path();
        let bytes = std::fs::metadata(&path).expect("its size").len() as usize;
        std::fs::write(path, vec![0x5a; bytes]).expect("damaged");
    }
    let ran = lab.dewar(&["checkpoint", "g", "--tag", "second"]).done();
    assert_eq!(ran.json()["parent"], Value::Null);
    assert!(ran.stderr.contains("all pages are stored"), "{}", ran.stderr);
    // And the one after that stands on it.
    let third = assert_exact(&lab, &mut guest, "third");
    assert_eq!(third["parent"], ran.json()["checkpoint"]);
}

#[test]
#[ignore = "long: make test-long"]
fn images_outlive_those_they_were_taken_on() {
    let lab = common::lab();
    let mut guest = guest(&lab, "g");
    guest.console.ask("check 6000 2 disk").expect("check");
    let mut images: Vec<String> = Vec::new();
    // As random as a fixed seed makes it.
    let mut seed = 12_345_u32;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 16) as usize % below
    };
    for round in 0..rounds("checkpoints on one another", 14, 4) {
        images.push(id(&lab.dewar(&["checkpoint", "g"]).done().json()));
        guest.console.ask("verify").expect("the guest runs on, consistent");
        if round % 3 == 2 {
            let gone = images.remove(random(images.len()));
            lab.dewar(&["delete", &gone]).done();
            let told = lab.dewar(&["gc", "--dry-run"]).done().json();
            let freed = lab.dewar(&["gc"]).done().json();
            assert_eq!(freed["segments_compacted"], told["segments_compacted"]);
            let again = lab.dewar(&["gc", "--dry-run"]).done().json();
            assert_eq!(again["bytes_freed"], 0);
            for image in &images {
                lab.dewar(&["verify", image]).done();
            }
        }
    }
    while let Some(image) = (!images.is_empty()).then(|| images.remove(random(images.len()))) {
        lab.crash("g");
        lab.restore(&mut guest, &[&image, "--eager"]).expect("restore");
        guest.console.ask("verify").expect("consistent after restore");
        lab.dewar(&["rm", "g", "--force"]).done();
        lab.dewar(&["delete", &image]).done();
    }
    // Nothing is left of them.
    let left = common::files(&lab.store().join("segments"));
    assert!(left.is_empty(), "{left:?}");
}

/// Where a guest's QEMU has its RAM file mapped.
fn memory_start(lab: &Lab, name: &str) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", lab.pid(name).expect("pid")));
    let maps = maps.expect("maps");
    let line = maps.lines().find(|line| line.contains("/dewar-")).expect("RAM");
    u64::from_str_radix(line.split('-').next().expect("start"), 16).expect("a number")
}

#[test]
fn lost_tracking_is_noticed() {
    let lab = common::lab();
    let mut guest = guest(&lab, "g");
    guest.console.ask("check 12000 2 disk").expect("check");
    let checkpoint = || lab.dewar(&["checkpoint", "g"]).done().json();
    checkpoint();
    // A command that took sets and died.
    HeldCheckpoint::at(&lab, "g", "epoch").kill();
    dewar_testkit::wait_until("the guardian", std::time::Duration::from_secs(20), || {
        lab.ps("g").expect("listed")["state"] == "running"
    });
    let told = assert_exact(&lab, &mut guest, "after a killed command");
    assert_eq!(told["tracked"], false, "{told}");
    assert!(number(&told["pages"]["unchanged"]) > 16_000, "compared: {told}");

    assert_eq!(checkpoint()["tracked"], true);
    // A tool that ended the tracking of a part of the memory.
    let tracker = lab.root().join("guests/g/tracking.json");
    let tracking: Value =
        serde_json::from_slice(&std::fs::read(tracker).expect("tracking")).expect("JSON");
    let process = ProcessHandle::open(Pid(lab.pid("g").expect("pid"))).expect("process");
    let uffd = known_userfaultfd_of(&process, number(&tracking["tracker"])).expect("traced");
    let uffd = uffd.expect("it is there");
    let start = memory_start(&lab, "g") + (32 << 20);
    uffd.unregister(&(start..start + (64 << 10))).expect("unregister");
    drop((uffd, process));
    let told = assert_exact(&lab, &mut guest, "after a part was let go");
    assert_eq!(told["tracked"], false, "{told}");
    assert_eq!(checkpoint()["tracked"], true);
    guest.console.ask("verify").expect("consistent");
}

/// Another process, restored: it is compared with the image that it came from.
#[test]
#[ignore = "long: make test-long"]
fn one_that_was_restored_is_compared() {
    let lab = common::lab();
    let mut guest = guest(&lab, "g");
    guest.console.ask("check 12000 2 disk").expect("check");
    let first = assert_exact(&lab, &mut guest, "first");
    lab.crash("g");
    lab.restore(&mut guest, &[&id(&first)]).expect("restore");
    lab.wait_for_memory("g");
    let told = assert_exact(&lab, &mut guest, "restored");
    assert_eq!(told["tracked"], false, "{told}");
    assert!(number(&told["pages"]["unchanged"]) > 16_000, "{told}");

    // And under another name, which no image has yet.
    lab.crash("g");
    lab.dewar(&["restore", &id(&told), "--as", "h", "--eager"]).done();
    let copy = lab.dewar(&["checkpoint", "h"]).done().json();
    assert_eq!(copy["parent"], told["checkpoint"]);
    assert!(number(&copy["pages"]["unchanged"]) > 16_000, "{copy}");
}

/// Another root knows nothing of this one, and what it takes this one lacks.
#[test]
#[ignore = "long: make test-long"]
fn tracking_that_another_root_used_is_noticed() {
    let lab = common::lab();
    let mut guest = guest(&lab, "g");
    guest.console.ask("check 12000 2 disk").expect("check");
    assert_exact(&lab, &mut guest, "first");
    let before = lab.dewar(&["checkpoint", "g"]).done().json();
    let other = common::lab();
    // It adopts the guest by the same socket, and takes every set since.
    let socket = lab.root().join("guests/g/qmp.sock");
    let adopted = other.dewar(&["adopt", "g", "--qmp", &socket.display().to_string()]);
    adopted.done();
    other.dewar(&["checkpoint", "g"]).done();
    let told = assert_exact(&lab, &mut guest, "after another root");
    assert_eq!(told["tracked"], false, "{told}");
    assert_eq!(told["parent"], before["checkpoint"]);
    guest.console.ask("verify").expect("consistent");
}

#[test]
#[ignore = "long: make test-long"]
fn killed_on_top_of_another() {
    let lab = common::lab();
    let mut guest = guest(&lab, "g");
    guest.console.ask("check 6000 1 disk").expect("check");
    let first = id(&lab.dewar(&["checkpoint", "g"]).done().json());
    let steps = ["armed", "bulk-done", "epoch", "stopped", "captured", "written-behind", "synced"];
    for step in sample("steps of a checkpoint on top of another", steps.to_vec(), 4) {
        let held = HeldCheckpoint::at(&lab, "g", step);
        // Its parent cannot go meanwhile.
        lab.dewar(&["delete", &first]).failed(1, &["is being"]);
        let guardian = held.guardian().expect("a guardian");
        held.kill();
        dewar_testkit::wait_while_alive(guardian);
        lab.dewar(&["verify", &first]).done();
        let told = assert_exact(&lab, &mut guest, step);
        lab.dewar(&["delete", &id(&told)]).done();
        lab.dewar(&["verify", &first]).done();
    }
}

#[test]
#[ignore = "long: make test-long"]
fn another_root_leaves_a_guest_alone_whose_memory_is_arriving() {
    let lab = common::lab();
    let spec = GuestSpec { memory_mib: 1280, disks: Vec::new(), ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("fill 1000 noise").expect("fill");
    guest.console.ask("check 6000 1 none").expect("check");
    lab.dewar(&["checkpoint", "g", "--tag", "t"]).done();
    let socket = lab.root().join("guests/g/qmp.sock").display().to_string();
    let tries = (0..8).find_map(|_| {
        lab.crash("g");
        lab.restore(&mut guest, &["t"]).expect("restore");
        let server = lab.pid_on_record("g", "server");
        // What the guest uses is there, most is not.
        std::thread::sleep(std::time::Duration::from_millis(150));
        dewar_testkit::kill(server, rustix::process::Signal::STOP);
        let other = common::lab();
        let adopted = other.dewar(&["adopt", "g", "--qmp", &socket]);
        let told = match adopted.code {
            0 => other.dewar(&["checkpoint", "g"]),
            _ => adopted,
        };
        // TCG delivers an interrupt with QEMU's lock held (cpu_handle_interrupt): where the
        // stack that it is put on is missing QMP cannot answer, and nothing is shown.
        let waits = told.stderr.contains("did not answer");
        if waits {
            dewar_testkit::kill(server, rustix::process::Signal::KILL);
            dewar_testkit::wait_while_alive(server);
        }
        // While its lab is there, the guest is.
        (!waits).then_some((told, server, other))
    });
    let (told, server, _other) = tries.expect("a guest that is arriving and answers");
    told.failed(1, &["busy", "no checkpoint was made"]);
    // QEMU still holds the descriptor: with the server gone, touches wait.
    dewar_testkit::kill(server, rustix::process::Signal::KILL);
    dewar_testkit::wait_while_alive(server);
    lab.dewar(&["restore", "g"]).done();
    guest.console.ask("verify").expect("every page is its own");
}
