//! Another QEMU under a guest that writes memory and disk at full speed and
//! checks itself.

use crate::common::{self, HeldCheckpoint, qemus};
use dewar_testkit::{
    Console, DiskSpec, GuestSpec, Lab, SmallDisk, TestGuest, kill, next_qemu, qemu, rounds, sample,
    wait_until, wait_while_alive,
};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::Signal;
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The other QEMU, or a word that the test is skipped.
fn other(test: &str) -> Option<PathBuf> {
    let found = next_qemu();
    if found.is_none() {
        println!("SKIPPED {test}: there is no second QEMU (scripts/fetch-qemu.sh)");
    }
    found
}

/// Upgrades a guest and reaches its program in the new QEMU.
fn upgrade(lab: &Lab, guest: &mut TestGuest, program: &str) -> Value {
    let told = lab.dewar(&["upgrade", &guest.name, "--qemu", program]).done().json();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    told
}

#[test]
fn a_busy_guest_moves_to_another_qemu_and_back() {
    let Some(next) = other("a_busy_guest_moves_to_another_qemu_and_back") else { return };
    let lab = common::lab();
    let raw = DiskSpec { format: "raw", cache: "none", ..DiskSpec::default() };
    let spec = GuestSpec {
        vcpus: 2,
        disks: vec![DiskSpec::default(), raw],
        beat_ms: 1,
        ..GuestSpec::default()
    };
    // A machine type that both know.
    let spec = GuestSpec { extra: vec!["-machine".into(), "pc-q35-7.2".into()], ..spec };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("check 8000 2 disk hard").expect("check");
    let before = lab.pid("g").expect("pid");
    let there_and_back = rounds("moves of a busy guest to another QEMU", 4, 2);
    let versions = [next.display().to_string(), qemu()];
    let mut now = before;
    for (round, program) in versions.iter().cycle().take(there_and_back).enumerate() {
        let heartbeat = guest.heartbeat().expect("heartbeat");
        let began = Instant::now();
        let told = upgrade(&lab, &mut guest, program);
        println!("round {round}: {told}; gap {:?}", heartbeat.between(began, Instant::now()));
        assert_ne!(told["qemu"], told["qemu_before"]);
        let pid = lab.pid("g").expect("pid");
        assert!(pid != now && !dewar_testkit::is_alive(now), "{told}");
        now = pid;
        guest.console.ask("verify").expect("consistent");
        std::thread::sleep(Duration::from_millis(300));
        guest.console.ask("verify").expect("consistent");
    }
    let record = lab.dewar(&["inspect", "g"]).done().json();
    assert_eq!(record["state"], "running");
    lab.dewar(&["stop", "g", "--now"]).done();
    assert!(!lab.root().join("guests/g/handover.json").exists());
}

/// A guest under load that can be upgraded to `other`.
fn busy_guest(lab: &Lab, name: &str) -> TestGuest {
    let user = format!("unix:{}/{name}.qmp,server=on,wait=off", lab.path().display());
    let extra = ["-machine", "pc-q35-7.2", "-qmp", &user].map(str::to_owned).to_vec();
    let mut guest = lab.run(name, &GuestSpec { extra, ..GuestSpec::default() }).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    guest
}

/// That exactly one QEMU runs the guest, and that it is whole; returns its
/// process.
fn assert_one_whole(lab: &Lab, guest: &mut TestGuest, after: &str) -> i32 {
    let folder = lab.root().join("guests").join(&guest.name);
    let files = ["handover.json", "journal.json", "qmp.sock~"];
    wait_until(&format!("{after}: all is settled"), Duration::from_secs(60), || {
        !files.iter().any(|file| folder.join(file).exists())
    });
    wait_until(&format!("{after}: one QEMU"), Duration::from_secs(20), || qemus(lab).len() == 1);
    let mut told = Value::Null;
    wait_until(&format!("{after}: nobody works on it"), Duration::from_secs(20), || {
        told = lab.ps(&guest.name).expect("listed");
        told["state"] != "busy"
    });
    assert_eq!(told["state"], "running", "{after}: {told}");
    let pid = told["pid"].as_i64().expect("pid") as i32;
    assert_eq!(qemus(lab), [pid], "{after}");
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").unwrap_or_else(|error| panic!("{after}: {error}"));
    pid
}

const STEPS: [&str; 8] = [
    "starting the new QEMU",
    "started",
    "armed",
    "moving",
    "listening",
    "begun",
    "resumed",
    "moved",
];
/// From this one on the guest may have moved.
const MOVED: usize = 5;

fn held_upgrade(lab: &Lab, program: &std::path::Path, step: &str) -> HeldCheckpoint {
    HeldCheckpoint::at_with(lab, &["upgrade", "g", "--qemu", &program.display().to_string()], step)
}

#[test]
fn killed_at_every_step_exactly_one_runs() {
    let Some(next) = other("killed_at_every_step_exactly_one_runs") else { return };
    let lab = common::lab();
    let mut guest = busy_guest(&lab, "g");
    let mut program = next.clone();
    let whom = ["dewar", "both", "guardian"];
    let all = STEPS.iter().enumerate().flat_map(|it| whom.map(|whom| (it, whom))).collect();
    for ((number, step), whom) in sample("kills in an upgrade", all, 12) {
        let before = qemus(&lab);
        let held = held_upgrade(&lab, &program, step);
        let guardian = held.guardian();
        if whom != "dewar" {
            kill(guardian.expect("a guardian"), Signal::KILL);
        }
        match whom {
            "guardian" => assert_eq!(held.go_on().0, 0, "{step}"),
            _ => held.kill(),
        }
        if whom == "both" {
            // A dying process holds its locks a little longer.
            wait_while_alive(guardian.expect("a guardian"));
            lab.dewar(&["ps"]).done();
        }
        let after = format!("{whom} killed at '{step}'");
        let pid = assert_one_whole(&lab, &mut guest, &after);
        let moved = before != [pid];
        assert!(whom != "guardian" || moved, "{after}");
        assert!(moved == (whom == "guardian" || number >= MOVED), "{after}: moved: {moved}");
        if moved {
            program = if program == next { qemu().into() } else { next.clone() };
        }
    }
    lab.dewar(&["checkpoint", "g"]).done();
}

#[test]
fn a_new_qemu_that_dies_leaves_the_guest_in_the_old_one() {
    let Some(next) = other("a_new_qemu_that_dies_leaves_the_guest_in_the_old_one") else { return };
    let lab = common::lab();
    let mut guest = busy_guest(&lab, "g");
    let old = lab.pid("g").expect("pid");
    for step in ["started", "armed", "moving"] {
        let held = held_upgrade(&lab, &next, step);
        let new = qemus(&lab).into_iter().find(|pid| *pid != old).expect("a new QEMU");
        kill(new, Signal::KILL);
        let (code, _, said) = held.go_on();
        assert_eq!(code, 1, "{step}: {said}");
        assert!(said.contains("was not moved") && said.contains("is running"), "{said}");
        assert_eq!(assert_one_whole(&lab, &mut guest, &format!("new killed at {step}")), old);
    }
    // The stream is sent and it dies before it lets the guest run, or hangs: by itself an
    // old one that sent all would stand still for ever.
    for whom in ["new", "new, then dewar", "dewar, then new", "nobody"] {
        let held = held_upgrade(&lab, &next, "listening");
        let new = qemus(&lab).into_iter().find(|pid| *pid != old).expect("a new QEMU");
        let dewar = held.pid;
        kill(new, Signal::STOP);
        let steps = guest.console.ask_number("count").expect("count");
        let waiter = std::thread::spawn(move || held.go_on());
        std::thread::sleep(Duration::from_secs(1));
        let killed = match whom {
            "nobody" => vec![],
            "new" => vec![new],
            "new, then dewar" => vec![new, dewar],
            _ => vec![dewar, new],
        };
        let lives = !killed.contains(&dewar);
        killed.into_iter().for_each(|pid| kill(pid, Signal::KILL));
        let (code, _, said) = waiter.join().expect("thread");
        println!("{whom}: {code} {said}");
        assert!(!lives || code == 1, "{said}");
        assert_eq!(assert_one_whole(&lab, &mut guest, whom), old);
        assert!(guest.console.ask_number("count").expect("count") > steps);
    }
}

/// Another program takes the disk the moment that the old QEMU lets go of it:
/// the new one has all of the state and cannot run.
#[test]
#[ignore = "long: make test-long"]
fn a_disk_that_is_taken_away_leaves_the_guest_in_the_old_qemu() {
    let Some(next) = other("a_disk_that_is_taken_away_leaves_the_guest") else { return };
    let lab = common::lab();
    let mut guest = busy_guest(&lab, "g");
    let old = lab.pid("g").expect("pid");
    let held = held_upgrade(&lab, &next, "moving");
    let path = guest.folder.join("disk0.qcow2");
    let disk = std::fs::File::options().read(true).write(true).open(path).expect("disk");
    // As a program that wants nobody else to write: QEMU asks whether there is
    // one when it takes a disk, not while it has it.
    fcntl_lock(&disk, FlockOperation::LockShared).expect("lock");
    let (code, _, said) = held.go_on();
    assert_eq!(code, 5, "{said}");
    assert!(said.contains("was not moved") && said.contains("lock"), "{said}");
    assert_eq!(qemus(&lab), [old]);
    drop(disk);
    // The guardian tries until it can.
    assert_eq!(assert_one_whole(&lab, &mut guest, "the disk was taken"), old);
    upgrade(&lab, &mut guest, &next.display().to_string());
    assert_one_whole(&lab, &mut guest, "the disk is back");
}

/// The folder of the guests' records is full when the guest has moved.
#[test]
fn a_full_disk_after_the_hand_over_leaves_the_guest_in_the_new_qemu() {
    let Some(next) = other("a_full_disk_after_the_hand_over") else { return };
    let lab = common::lab();
    let records = lab.root().join("guests");
    let small = SmallDisk::mount(&records, "1m").expect("small disk");
    let mut guest = busy_guest(&lab, "g");
    let before = lab.pid("g").expect("pid");
    let held = held_upgrade(&lab, &next, "resumed");
    small.fill().expect("full");
    let (code, _, said) = held.go_on();
    assert_eq!(code, 5, "{said}");
    assert!(said.contains("moved to its new QEMU") && said.contains("No space left"), "{said}");
    // The guest is where it should be, and stays there while nothing can be finished.
    guest.console = Console::connect(&guest.folder.join("console~")).expect("console");
    guest.console.ask("verify").expect("it runs in the new QEMU");
    lab.dewar(&["ps"]);
    guest.console.ask("verify").expect("it still does");
    small.free().expect("room");
    let pid = assert_one_whole(&lab, &mut guest, "with room again");
    assert_ne!(pid, before);
    lab.dewar(&["stop", "g", "--now"]).done();
}

#[test]
fn what_was_not_handed_over_is_told_by_any_command_that_finishes() {
    let lab = common::lab();
    let mut guest = busy_guest(&lab, "g");
    let own = lab.path().join("g.qmp");
    let held = HeldCheckpoint::at_with(&lab, &["upgrade", "g"], "resumed");
    // Somebody puts something else where the user's socket was.
    std::fs::remove_file(&own).expect("remove");
    std::fs::create_dir(&own).expect("a folder");
    held.kill();
    assert_one_whole(&lab, &mut guest, "its guardian finished it");
    let told = |lab: &Lab| lab.ps("g").expect("listed")["not_handed_over"].clone();
    let what = told(&lab)[0].as_str().expect("a sentence").to_owned();
    assert!(what.contains("g.qmp has no new owner"), "{what}");
    let inspected = lab.dewar(&["inspect", "g"]).done().json();
    assert_eq!(inspected["guest"]["not_handed_over"][0], what);
    std::fs::remove_dir(&own).expect("remove");
    assert!(lab.path().join("g.qmp~").exists(), "where it is meanwhile");
    lab.dewar(&["upgrade", "g"]).done();
    assert_one_whole(&lab, &mut guest, "nothing is in the way");
    assert_eq!(told(&lab), serde_json::json!([]));
    assert!(!lab.path().join("g.qmp~").exists(), "where it was meanwhile");
    std::os::unix::net::UnixStream::connect(&own).expect("the user's socket");
}

/// With the last of the state sent the guest is the new one's; before, it dies with the old one.
#[test]
fn an_old_qemu_that_dies_takes_the_guest_with_it_or_has_handed_it_over() {
    let Some(next) = other("an_old_qemu_that_dies_takes_the_guest") else { return };
    let lab = common::lab();
    let mut guest = busy_guest(&lab, "g");
    lab.dewar(&["checkpoint", "g", "--tag", "before"]).done();
    let mut program = next.clone();
    // Where some are tried, the one at which it may have moved is.
    let mut all: Vec<_> = STEPS.into_iter().enumerate().collect();
    all.rotate_left(1);
    for (number, step) in sample("steps of an upgrade whose old QEMU dies", all, 4) {
        let old = lab.pid("g").expect("pid");
        let held = held_upgrade(&lab, &program, step);
        kill(old, Signal::KILL);
        wait_while_alive(old);
        let (code, _, said) = held.go_on();
        let after = format!("old killed at '{step}': {code} {said}");
        println!("{after}");
        // How much it had sent by then is anyone's guess.
        let may_be = if number == MOVED { [0, 5] } else { [if number > MOVED { 0 } else { 5 }; 2] };
        assert!(may_be.contains(&code), "{after}");
        if code == 0 {
            assert_ne!(assert_one_whole(&lab, &mut guest, &after), old);
            program = if program == next { qemu().into() } else { next.clone() };
            continue;
        }
        wait_until("no QEMU", Duration::from_secs(20), || qemus(&lab).is_empty());
        assert_eq!(lab.ps("g").expect("listed")["state"], "ended", "{after}");
        lab.restore(&mut guest, &["before"]).expect("restore");
        guest.console.ask("verify").expect("consistent");
        lab.wait_for_memory("g");
        // As it was started.
        program = next.clone();
    }
}

/// The new QEMU dies when it has let the guest run: the old one's guest is of an
/// instant that is past, and must not go on.
#[test]
#[ignore = "long: make test-long"]
fn a_new_qemu_that_dies_with_the_guest_is_a_crash() {
    let Some(next) = other("a_new_qemu_that_dies_with_the_guest") else { return };
    let lab = common::lab();
    let mut guest = busy_guest(&lab, "g");
    lab.dewar(&["checkpoint", "g", "--tag", "before"]).done();
    for step in ["resumed", "moved"] {
        let old = lab.pid("g").expect("pid");
        let held = held_upgrade(&lab, &next, step);
        end_new(&lab, old);
        let (code, _, said) = held.go_on();
        // With the last step it has moved, whatever came then.
        assert_eq!(code, if step == "moved" { 0 } else { 5 }, "{said}");
        assert!(code == 0 || said.contains("the guest has crashed"), "{said}");
        wait_until("no QEMU", Duration::from_secs(20), || qemus(&lab).is_empty());
        assert_eq!(lab.ps("g").expect("listed")["state"], "ended");
        lab.restore(&mut guest, &["before"]).expect("restore");
        assert_one_whole(&lab, &mut guest, "restored");
        lab.wait_for_memory("g");
    }
}

/// All who could tell whether the guest ran in the new QEMU die: nothing is guessed.
#[test]
fn a_guest_of_which_nobody_knows_stands_still_until_it_is_given_up() {
    let Some(next) = other("a_guest_of_which_nobody_knows") else { return };
    let lab = common::lab();
    let mut guest = busy_guest(&lab, "g");
    lab.dewar(&["checkpoint", "g", "--tag", "before"]).done();
    let old = lab.pid("g").expect("pid");
    let held = held_upgrade(&lab, &next, "begun");
    let guardian = held.guardian().expect("a guardian");
    kill(guardian, Signal::KILL);
    wait_while_alive(guardian);
    held.kill();
    wait_until("it runs in the new QEMU", Duration::from_secs(20), || {
        guest.console = Console::connect(&guest.folder.join("console~")).expect("console");
        guest.console.ask("count").is_ok()
    });
    end_new(&lab, old);
    let verbs = ["checkpoint", "upgrade", "freeze", "restore"].map(|verb| vec![verb, "g"]);
    for line in verbs.iter().chain([&vec!["ps"]]) {
        lab.dewar(line).failed(5, &["nobody saw whether the guest ran", &format!("kill {old}")]);
    }
    assert_eq!(qemus(&lab), [old]);
    // As it was told to do.
    kill(old, Signal::KILL);
    wait_while_alive(old);
    lab.restore(&mut guest, &["before"]).expect("restore");
    assert_one_whole(&lab, &mut guest, "given up");
}

/// Kills the QEMU that a hand-over started.
fn end_new(lab: &Lab, old: i32) {
    let new = qemus(lab).into_iter().find(|pid| *pid != old).expect("a new QEMU");
    kill(new, Signal::KILL);
    wait_while_alive(new);
}

#[test]
#[ignore = "long: make test-long"]
fn twenty_in_a_row_with_checkpoints_between_keep_the_chain() {
    let Some(next) = other("twenty_in_a_row") else { return };
    let lab = common::lab();
    let mut guest = busy_guest(&lab, "g");
    guest.console.ask("fill 64 noise").expect("fill");
    lab.dewar(&["checkpoint", "g"]).done();
    for round in 0..rounds("upgrades in a row", 20, 6) {
        let program = if round % 2 == 0 { next.display().to_string() } else { qemu() };
        upgrade(&lab, &mut guest, &program);
        guest.console.ask("verify").expect("consistent");
        if round % 5 == 4 {
            // What was written in the process before is in it, and no more.
            let told = common::assert_exact(&lab, &mut guest, &format!("round {round}"));
            assert_eq!(told["tracked"], true, "{told}");
            let unchanged = told["pages"]["unchanged"].as_u64().expect("number");
            assert!(unchanged > 16_000, "{told}");
        }
    }
    assert_one_whole(&lab, &mut guest, "twenty upgrades");
}

#[test]
#[ignore = "long: make test-long"]
fn six_idle_guests_at_once() {
    let Some(next) = other("six_idle_guests_at_once") else { return };
    let lab = common::lab();
    let mut guests: Vec<TestGuest> = (0..6)
        .map(|number| {
            let extra = ["-machine", "pc-q35-7.2"].map(str::to_owned).to_vec();
            let spec = GuestSpec { extra, memory_mib: 192, ..GuestSpec::default() };
            lab.run(&format!("g{number}"), &spec).expect("guest")
        })
        .collect();
    let before = qemus(&lab);
    let told =
        lab.dewar(&["upgrade", "--all", "--qemu", &next.display().to_string()]).done().json();
    assert_eq!(told["done"], 6, "{told}");
    let after = qemus(&lab);
    assert_eq!(after.len(), 6);
    assert!(after.iter().all(|pid| !before.contains(pid)), "{before:?} {after:?}");
    for guest in &mut guests {
        guest.console = Console::connect(&guest.folder.join("console")).expect("console");
        guest.console.ask("count").expect("it runs");
    }
    assert!(told["guests"].as_array().expect("list").iter().all(|it| it["exit_code"] == 0));
}

/// What `make test-kvm` runs under real KVM, from QEMU to the same QEMU.
#[test]
fn moves_and_freezes_under_kvm() {
    if std::env::var("DEWAR_TEST_ACCEL").is_err() {
        println!("SKIPPED moves_and_freezes_under_kvm: it runs in 'make test-kvm'");
        return;
    }
    let lab = common::lab();
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "g"]).done();
    let told = upgrade(&lab, &mut guest, &qemu());
    println!("{told}");
    guest.console.ask("verify").expect("consistent after the upgrade");
    let told = common::assert_exact(&lab, &mut guest, "in the new QEMU");
    assert_eq!(told["tracked"], true, "{told}");
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).done();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent after the thaw");
    let told = common::assert_exact(&lab, &mut guest, "after the thaw");
    assert_eq!(told["tracked"], true, "{told}");
}
