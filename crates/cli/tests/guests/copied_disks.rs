//! Guests that move to another host with their disks.

use crate::common::{self, HeldCheckpoint};
use crate::migrate::{Hosts, end, words};
use dewar_guest_qemu::Qmp;
use dewar_testkit::{DiskSpec, GuestSpec, Lab, kill, sample};
use rustix::process::Signal;
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// A guest that writes its disk, without a rest or with (see the guest's `check`), which the second host
/// does not have.
fn hosts(pace: &str) -> Hosts {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask(&format!("check 2000 1 disk {pace}")).expect("check");
    std::fs::remove_file(disk(&hosts, true)).expect("remove");
    hosts
}

/// Where a host's disk is, seen from outside.
fn disk(hosts: &Hosts, at_b: bool) -> PathBuf {
    let lab = if at_b { &hosts.b } else { &hosts.a };
    lab.guest_folder("g").expect("folder").join("disk0.qcow2")
}

const COPY: [&str; 3] = ["--with-disks", "--max-downtime", "2s"];

#[test]
fn a_guest_moves_with_its_disks() {
    let mut hosts = hosts("hard");
    // A far link: what the guest writes last is not there yet when it is stopped.
    let link = hosts.a.program().with_file_name("dewar-link");
    let via = format!("{} 1000 30 {}", link.display(), hosts.b.via());
    let moved = hosts.a.dewar(&words(&Hosts::line_via(&via, &hosts.b, &COPY))).done();
    println!("{}", moved.stdout.trim());
    assert!(hosts.assert_on_one("copied"));
    assert!(disk(&hosts, true).exists() && disk(&hosts, false).exists());
    // Its old disk is in the way of the way back.
    Hosts::migrate(&hosts.b, &hosts.a, &COPY).failed(4, &["is there already", "--disk-map"]);
    // By the path that the guest has it, and post-copy on top.
    let here = hosts.a.guest_folder("g").expect("folder").join("disk0.qcow2");
    let there = here.with_file_name("again.qcow2");
    let map = format!("{}={}", here.display(), there.display());
    let more = [&COPY[..], &["--disk-map", &map, "--postcopy"]].concat();
    Hosts::migrate(&hosts.b, &hosts.a, &more).done();
    assert!(!hosts.assert_on_one("copied back"));
    // It is that file now.
    let store = hosts.a.store().display().to_string();
    hosts.a.dewar(&["checkpoint", "g", "--store", &store]).done();
    let line = hosts.a.dewar(&["inspect", "g"]).done().stdout;
    assert!(line.contains("again.qcow2"), "{line}");
    assert_eq!(hosts.records(), Vec::<PathBuf>::new(), "nothing is to be remembered");
}

/// What the guest wrote while nothing was copied is in the copy, to the last byte.
#[test]
#[ignore = "long: make test-long"]
fn what_is_written_last_is_in_the_copy() {
    let a = common::lab().as_host().expect("first host");
    let monitor = a.guest_folder("g").expect("folder").join("mon.sock");
    let monitor = format!("unix:{},server=on,wait=off", monitor.display());
    let extra = ["-qmp".to_owned(), monitor].to_vec();
    let mut hosts = Hosts::with(a, &GuestSpec { extra, ..GuestSpec::default() });
    hosts.guest.console.ask("check 2000 1 disk hard").expect("check");
    std::fs::remove_file(disk(&hosts, true)).expect("remove");
    let line = Hosts::line(&hosts.b, &COPY);
    // The command carries the copy: while it stands still, what is written waits.
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line), "sending changes");
    std::thread::sleep(Duration::from_secs(1));
    let qmp = |lab: &Lab| {
        let socket = lab.guest_folder("g").expect("folder").join("mon.sock");
        Qmp::connect(&socket).expect("QMP")
    };
    let mut at_a = qmp(&hosts.a);
    let (code, _, said) = std::thread::scope(|scope| {
        // QEMU waits for what it has sent.
        scope.spawn(|| at_a.execute("stop", json!({})).expect("stop"));
        std::thread::sleep(Duration::from_secs(3));
        held.go_on()
    });
    assert_eq!(code, 0, "{said}");
    assert_eq!(hosts.states(), ["-", "paused"].map(str::to_owned));
    let [a, b] = [false, true].map(|at_b| disk(&hosts, at_b).display().to_string());
    let compared = Command::new("qemu-img").args(["compare", "-U", &a, &b]).output();
    let compared = compared.expect("qemu-img");
    assert!(compared.status.success(), "{}", String::from_utf8_lossy(&compared.stdout));
    qmp(&hosts.b).execute("cont", json!({})).expect("cont");
    assert!(hosts.assert_on_one("let run there"));
}

/// A disk that is shared, and mounted elsewhere there.
#[test]
#[ignore = "long: make test-long"]
fn a_shared_disk_may_have_another_path_there() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 2000 1 disk").expect("check");
    let there = disk(&hosts, true);
    std::fs::rename(&there, there.with_file_name("mounted.qcow2")).expect("rename");
    let here = disk(&hosts, false);
    let map = format!("{}={}", here.display(), here.with_file_name("mounted.qcow2").display());
    Hosts::migrate(&hosts.a, &hosts.b, &["--disk-map", &map, "--max-downtime", "1s"]).done();
    assert!(hosts.assert_on_one("mapped"));
    let map = "/nonexistent=/there";
    Hosts::migrate(&hosts.b, &hosts.a, &["--disk-map", map]).failed(4, &["no disk of its command"]);
}

/// Whatever dies while disks are copied, the guest stays as it was, and nothing is left of the copies.
#[test]
#[ignore = "long: make test-long"]
fn copies_that_fail_leave_nothing() {
    let mut hosts = hosts("soft");
    let line = Hosts::line(&hosts.b, &COPY);
    let all =
        ["copying disks", "sending memory", "intent", "receiving memory", "loading the devices"];
    for step in sample("steps of a move with disks", all.to_vec(), 3) {
        let after = format!("killed at '{step}'");
        hosts.killed_at(step, &["--with-disks"]);
        assert_eq!(hosts.quiet_states(&after), ["running", "-"].map(str::to_owned), "{after}");
        assert!(!disk(&hosts, true).exists(), "{after}: its copy is left");
        assert!(!hosts.assert_on_one(&after));
    }
    // The QEMU there ends.
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line), "copying disks");
    end(Hosts::qemu_of(&hosts.b));
    let (code, _, said) = held.go_on();
    assert_eq!(code, 1, "{said}");
    assert!(!hosts.assert_on_one("its QEMU there ended"));
    assert!(!disk(&hosts, true).exists(), "its copy is left");
    // The link is cut.
    let via = format!("sh -c 'cat | \"$@\" | cat' sh {}", hosts.b.via());
    let line = Hosts::line_via(&via, &hosts.b, &COPY);
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line), "copying disks");
    crate::migrate::cut_link(held.pid);
    let (code, _, said) = held.go_on();
    assert_eq!(code, 1, "{said}");
    assert!(!hosts.assert_on_one("the link was cut"));
    assert!(!disk(&hosts, true).exists(), "its copy is left");
    // Nothing is under way with it: it can be frozen.
    hosts.a.dewar(&["freeze", "g"]).done();
    hosts.a.dewar(&["thaw", "g"]).done();
    assert!(!hosts.assert_on_one("thawed"));
    assert_eq!(common::files(&hosts.b.root().join("guests")), Vec::<PathBuf>::new());
    assert_eq!(hosts.records(), Vec::<PathBuf>::new(), "nothing is to be remembered");
}

/// The link stands still while disks are copied: QEMU is not kept waiting for it, and the guest runs on.
#[test]
#[ignore = "long: make test-long"]
fn a_link_that_stands_still_keeps_no_guest_waiting() {
    let mut hosts = hosts("soft");
    let link = hosts.a.program().with_file_name("dewar-link");
    let via = format!("{} 50 0 {}", link.display(), hosts.b.via());
    let line = Hosts::line_via(&via, &hosts.b, &[&COPY[..], &["--tunnel"]].concat());
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line), "sending memory");
    kill(common::children(held.pid)[0], Signal::STOP);
    let began = Instant::now();
    let (code, _, said) = held.go_on();
    assert_eq!(code, 1, "{said}");
    assert!(began.elapsed() < Duration::from_secs(150), "{:?}: {said}", began.elapsed());
    hosts.reach(false);
    hosts.guest.console.ask("verify").expect("verify");
    hosts.a.dewar(&["freeze", "g"]).done();
    hosts.a.dewar(&["thaw", "g"]).done();
    let states = hosts.quiet_states("thawed");
    assert_eq!(states[0], "running", "{states:?}");
}

/// A raw disk is copied as a raw one.
#[test]
#[ignore = "long: make test-long"]
fn a_raw_disk_stays_raw() {
    let disks = vec![DiskSpec { format: "raw", ..DiskSpec::default() }];
    let mut hosts = Hosts::new(&GuestSpec { disks, ..GuestSpec::default() });
    hosts.guest.console.ask("check 2000 1 disk").expect("check");
    let here = hosts.a.guest_folder("g").expect("folder").join("disk0.raw");
    let map = format!("{}={}", here.display(), here.with_file_name("there.raw").display());
    let more = [&COPY[..], &["--disk-map", &map]].concat();
    Hosts::migrate(&hosts.a, &hosts.b, &more).done();
    assert!(hosts.assert_on_one("copied"));
    let line = hosts.b.dewar(&["inspect", "g"]).done().stdout;
    assert!(line.contains("there.raw,format=raw"), "{line}");
}
