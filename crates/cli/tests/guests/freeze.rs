//! Guests without a process, and back: their memory, their disks and the chain of
//! checkpoints go on as if nothing had been.

use crate::common::{self, HeldCheckpoint, free_port};
use dewar_guest_qemu::Qmp;
use dewar_testkit::{Console, GuestSpec, Lab, TestGuest, is_alive, kill, sample, wait_until};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

fn busy(lab: &Lab, name: &str) -> TestGuest {
    let mut guest = lab.run(name, &GuestSpec::default()).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    guest
}

fn reach(guest: &mut TestGuest) {
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
}

fn assert_whole(lab: &Lab, guest: &mut TestGuest, after: &str) {
    let mut told = Value::Null;
    wait_until(&format!("{after}: it runs"), Duration::from_secs(30), || {
        told = lab.ps(&guest.name).expect("listed");
        told["state"] == "running"
    });
    reach(guest);
    guest.console.ask("verify").unwrap_or_else(|error| panic!("{after}: {error}"));
    let folder = lab.root().join("guests").join(&guest.name);
    for file in ["journal.json", "sums.json", "thawing"] {
        assert!(!folder.join(file).exists(), "{after}: {file}");
    }
}

#[test]
fn what_a_qemu_would_truncate_is_kept_when_it_thaws() {
    let lab = common::lab();
    let log = lab.path().join("log");
    let extra = ["-D", &log.display().to_string(), "-d", "unimp"].map(str::to_owned).to_vec();
    let mut guest = lab.run("g", &GuestSpec { extra, ..GuestSpec::default() }).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    for round in ["first", "second"] {
        fs::write(&log, round).expect("as QEMU writes");
        lab.dewar(&["freeze", "g"]).done();
        lab.dewar(&["thaw", "g"]).done();
    }
    assert_whole(&lab, &mut guest, "two thaws");
    let kept = ["log.1", "log.2"].map(|name| fs::read_to_string(lab.path().join(name)));
    assert_eq!(kept.map(|text| text.expect("kept")), ["first", "second"]);
}

#[test]
#[ignore = "long: make test-long"]
fn a_frozen_guest_goes_on_and_so_does_its_chain() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    guest.console.ask("fill 64 noise").expect("fill");
    lab.dewar(&["checkpoint", "g"]).done();
    for round in 0..3 {
        let pid = lab.pid("g").expect("pid");
        lab.dewar(&["freeze", "g"]).done();
        assert!(!is_alive(pid));
        assert_eq!(lab.ps("g").expect("listed")["state"], "frozen");
        // Nothing that would harm it is done.
        lab.dewar(&["checkpoint", "g"]).failed(1, &["is frozen", "dewar thaw g"]);
        lab.dewar(&["rm", "g"]).failed(1, &["is frozen"]);
        lab.dewar(&["restore", "g"]).failed(1, &["guest 'g' is frozen", "--yes"]);
        lab.dewar(&["thaw", "g"]).done();
        assert_whole(&lab, &mut guest, &format!("round {round}"));
    }
    lab.dewar(&["thaw", "g"]).failed(1, &["is not frozen"]);
    let told = common::assert_exact(&lab, &mut guest, "after three freezes");
    assert_eq!(told["tracked"], true, "{told}");
    assert!(told["pages"]["unchanged"].as_u64().expect("number") > 16_000, "{told}");
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["rm", "g", "--force"]).done();
    assert_eq!(lab.ram_files("g"), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_guest_whose_memory_or_state_was_touched_is_refused() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    lab.dewar(&["freeze", "g"]).done();
    let frozen = lab.record("g");
    let open = |path: &Value| {
        fs::File::options().read(true).write(true).open(path.as_str().expect("path")).expect("open")
    };
    let ram = open(&frozen["ram"][0]["path"]);
    let state = open(&frozen["frozen"]["kept"]["in_place"]["state"]);
    let at = (200 << 20) + 77;
    for (file, at, words) in [
        (
            &ram,
            at,
            "was changed while it was frozen: RAM 'dewar-ram', bytes 0xc800000 to 0xca00000",
        ),
        (&state, 1000, "was changed"),
    ] {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("read");
        file.write_all_at(&[byte[0] ^ 4], at).expect("write");
        lab.dewar(&["thaw", "g"]).failed(1, &[words, "stays frozen"]);
        file.write_all_at(&byte, at).expect("write");
    }
    // A disk that is written while nobody has it: the guest remembers it otherwise.
    let disk = guest.folder.join("disk0.qcow2");
    let modified = fs::metadata(&disk).and_then(|data| data.modified()).expect("stat");
    let file = fs::File::options().read(true).write(true).open(&disk).expect("disk");
    let mut first = [0];
    file.read_exact_at(&mut first, 0).expect("read");
    file.write_all_at(&first, 0).expect("write");
    lab.dewar(&["thaw", "g"]).failed(1, &["disk0.qcow2 was written", "stays frozen", "--force"]);
    file.set_modified(modified).expect("as it was");
    // On storage that is not mounted yet.
    let away = disk.with_extension("away");
    fs::rename(&disk, &away).expect("rename");
    let ran = lab.dewar(&["thaw", "g"]).failed(1, &["is not there", "stays frozen"]);
    assert!(!ran.stderr.contains("--force"), "{}", ran.stderr);
    fs::rename(&away, &disk).expect("rename");
    lab.dewar(&["thaw", "g"]).done();
    assert_whole(&lab, &mut guest, "all is as it was");
    // Without checksums nobody can tell.
    lab.dewar(&["freeze", "g", "--no-checksum"]).done();
    lab.dewar(&["thaw", "g"]).done();
    assert_whole(&lab, &mut guest, "without checksums");
    // The machine was restarted: nothing is left of its memory.
    lab.dewar(&["checkpoint", "g", "--tag", "kept"]).done();
    lab.dewar(&["freeze", "g"]).done();
    let frozen = lab.record("g");
    for path in [&frozen["ram"][0]["path"], &frozen["frozen"]["kept"]["in_place"]["state"]] {
        fs::remove_file(path.as_str().expect("path")).expect("remove");
    }
    lab.dewar(&["thaw", "g"]).failed(1, &["'dewar rm --force'", "brings back a checkpoint"]);
    lab.dewar(&["rm", "g", "--force"]).done();
    lab.restore(&mut guest, &["kept"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}

/// The state cannot be written, and a program has the disk when the guest is to go
/// on: the guardian lets it go on as soon as that is possible.
#[test]
fn a_freeze_that_fails_leaves_nobody_standing() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let folder = lab.ram_files("g")[0].parent().expect("folder").to_owned();
    let in_the_way = folder.join(format!("{}.state", lab.ram_prefix("g")));
    fs::create_dir(&in_the_way).expect("folder");
    let held = HeldCheckpoint::at_with(&lab, &["freeze", "g"], "stopping the guest");
    let path = guest.folder.join("disk0.qcow2");
    let disk = fs::File::options().read(true).write(true).open(path).expect("disk");
    // QEMU asks whether somebody has it when it takes a disk, not while it has it.
    fcntl_lock(&disk, FlockOperation::LockShared).expect("lock");
    let (code, _, said) = held.go_on();
    fs::remove_dir(&in_the_way).expect("folder");
    assert_eq!(code, 5, "{said}");
    assert!(said.contains("was not frozen"), "{said}");
    drop(disk);
    // No command is run meanwhile.
    guest.console.ask("verify").expect("it goes on");
    assert_whole(&lab, &mut guest, "a failed freeze");
}

#[test]
fn killed_at_every_step_it_is_frozen_or_runs() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let in_place = ["on record", "stopping the guest", "writing its state", "kept"];
    let to_store = ["stopping the guest", "prepared", "resumed", "committed", "kept", "on record"];
    let cases = in_place.map(|step| (&["freeze", "g"][..], step)).into_iter();
    let cases = cases.chain(to_store.map(|step| (&["freeze", "g", "--to-store"][..], step)));
    // Of two kills at a step one hits the command alone, the other its guardian, too. Either comes first in turn.
    let all = cases.enumerate().flat_map(|(number, (line, step))| {
        let first = number % 2 == 1;
        [first, !first].map(|both| (line, step, both))
    });
    for (line, step, both) in sample("kills in a freeze", all.collect(), 10) {
        let held = HeldCheckpoint::at_with(&lab, line, step);
        if both {
            let guardian = held.guardian().expect("guardian");
            kill(guardian, Signal::KILL);
            dewar_testkit::wait_while_alive(guardian);
        }
        held.kill();
        let after = format!("{line:?} killed at '{step}', both {both}");
        wait_until(&after, Duration::from_secs(60), || {
            let state = lab.ps("g").expect("listed")["state"].clone();
            state == "running" || state == "frozen"
        });
        let is_frozen = lab.ps("g").expect("listed")["state"] == "frozen";
        assert_eq!(is_frozen, step == "on record", "{after}");
        if is_frozen {
            lab.dewar(&["thaw", "g"]).done();
        }
        assert_whole(&lab, &mut guest, &after);
        lab.wait_for_memory("g");
    }
}

#[test]
#[ignore = "long: make test-long"]
fn ports_that_were_forwarded_later_are_forwarded_again() {
    let lab = common::lab();
    let (first, second) = (free_port(), free_port());
    let user = lab.path().join("user.qmp");
    let extra = vec![
        "-qmp".to_owned(),
        format!("unix:{},server=on,wait=off", user.display()),
        "-netdev".to_owned(),
        format!("user,id=n0,hostfwd=tcp:127.0.0.1:{first}-:7"),
        "-device".to_owned(),
        "virtio-net-pci,netdev=n0".to_owned(),
    ];
    let mut guest = lab.run("g", &GuestSpec { extra, ..GuestSpec::default() }).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    for line in [
        format!("hostfwd_add n0 tcp:127.0.0.1:{second}-:7"),
        format!("hostfwd_remove n0 tcp:127.0.0.1:{first}"),
    ] {
        let mut qmp = Qmp::connect(&user).expect("the user's QMP");
        qmp.execute("human-monitor-command", json!({"command-line": line})).expect("monitor");
    }
    let answers = |port: u16| TcpStream::connect(("127.0.0.1", port)).is_ok();
    for more in [&[][..], &["--to-store"]] {
        assert!(answers(second) && !answers(first), "before {more:?}");
        lab.dewar(&[&["freeze", "g"], more].concat()).done();
        assert!(!answers(second), "{more:?}");
        let told = lab.dewar(&["thaw", "g"]).done().json();
        assert_eq!(told["not_forwarded"], json!([]), "{told}");
        assert_whole(&lab, &mut guest, &format!("{more:?}"));
        lab.wait_for_memory("g");
    }
    assert!(answers(second) && !answers(first));
    // Others have them by then: also the one that its command line names.
    lab.dewar(&["freeze", "g"]).done();
    let taken = [first, second].map(|port| TcpListener::bind(("127.0.0.1", port)).expect("free"));
    let ran = lab.dewar(&["thaw", "--all"]);
    let told = &ran.json()["guests"][0]["result"];
    assert!(told["not_forwarded"][0].as_str().is_some_and(|it| it.contains("forward")), "{told}");
    ran.failed(5, &["or not as they should be"]);
    drop(taken);
    assert_whole(&lab, &mut guest, "without its port");
}

/// Before its state is saved a guest that dies is lost, as in any crash; afterwards all
/// that there is of it is kept.
#[test]
#[ignore = "long: make test-long"]
fn a_qemu_that_dies_in_a_freeze_is_frozen_or_has_ended() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let in_place = ["stopping the guest", "writing its state", "summing up memory", "kept"];
    let to_store = ["stopping the guest", "prepared", "kept"];
    let cases = in_place.map(|step| (&["freeze", "g"][..], step)).into_iter();
    let cases = cases.chain(to_store.map(|it| (&["freeze", "g", "--to-store"][..], it)));
    let all = sample("steps of a freeze whose QEMU dies", cases.collect(), 4);
    for (number, (line, step)) in all.into_iter().enumerate() {
        let tag = format!("before-{number}");
        lab.dewar(&["checkpoint", "g", "--tag", &tag]).done();
        let after = format!("{line:?} at '{step}'");
        let held = HeldCheckpoint::at_with(&lab, line, step);
        end_qemu(&lab);
        let (code, _, said) = held.go_on();
        let state = lab.ps("g").expect("listed")["state"].clone();
        if step == "stopping the guest" || step == "prepared" {
            assert_eq!(code, 5, "{after}: {said}");
            assert!(said.contains("was not frozen"), "{after}: {said}");
            assert_eq!(state, "ended", "{after}");
            lab.restore(&mut guest, &[&tag]).expect("restore");
        } else {
            assert_eq!(code, 0, "{after}: {said}");
            assert_eq!(state, "frozen", "{after}");
            lab.dewar(&["thaw", "g"]).done();
        }
        assert_whole(&lab, &mut guest, &after);
        lab.wait_for_memory("g");
    }
}

/// Its user lets it run while its state is kept: what was kept is of an instant that is past.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_somebody_lets_run_meanwhile_is_not_frozen() {
    let lab = common::lab();
    let socket = lab.path().join("user-qmp");
    let user = format!("unix:{},server=on,wait=off", socket.display());
    let extra = vec!["-qmp".to_owned(), user];
    let mut guest = lab.run("g", &GuestSpec { extra, ..GuestSpec::default() }).expect("guest");
    guest.console.ask("fill 64 noise").expect("fill");
    guest.console.ask("check 2000 1 disk").expect("check");
    let ways =
        [&["freeze", "g"][..], &["freeze", "g", "--no-checksum"], &["freeze", "g", "--to-store"]];
    for line in ways {
        for again in [false, true] {
            let held = HeldCheckpoint::at_with(&lab, line, "kept");
            let mut qmp = Qmp::connect(&socket).expect("QMP");
            qmp.execute("cont", json!({})).expect("cont");
            if again {
                // Standing still when it is looked at, but not since.
                qmp.execute("stop", json!({})).expect("stop");
            }
            let (code, _, said) = held.go_on();
            assert_eq!(code, 1, "{line:?}: {said}");
            assert!(said.contains("somebody let it run"), "{line:?}: {said}");
            assert!(said.contains("was not frozen"), "{line:?}: {said}");
            if again {
                let _ = qmp.execute("cont", json!({}));
            }
            assert_eq!(lab.ps("g").expect("listed")["state"], "running", "{line:?}");
            guest.console.ask("verify").expect("consistent");
        }
    }
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).done();
    assert_whole(&lab, &mut guest, "frozen after all");
}

/// A machine goes down while another command has the guest: that is waited for.
#[test]
#[ignore = "long: make test-long"]
fn another_command_is_waited_for() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let held = HeldCheckpoint::at(&lab, "g", "bulk-done");
    lab.dewar(&["freeze", "g"]).failed(1, &["another dewar command"]);
    let all = ["freeze", "--all", "--wait", "90s"];
    let freezing = std::thread::scope(|scope| {
        let freezing = scope.spawn(|| lab.dewar(&all));
        std::thread::sleep(Duration::from_millis(500));
        let (code, _, said) = held.go_on();
        assert_eq!(code, 0, "{said}");
        freezing.join().expect("it ends")
    });
    freezing.done();
    assert_eq!(lab.ps("g").expect("listed")["state"], "frozen");
    lab.dewar(&["thaw", "g"]).done();
    assert_whole(&lab, &mut guest, "after a wait");
}

#[test]
fn thaw_killed_at_every_step_can_be_tried_again() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let all = ["loaded", "checking memory", "started", "starting QEMU", "thawed"];
    for step in sample("steps of a thaw", all.to_vec(), 3) {
        lab.dewar(&["freeze", "g"]).done();
        let held = HeldCheckpoint::at_with(&lab, &["thaw", "g"], step);
        held.kill();
        if step == "loaded" {
            // As one that has not made it yet.
            fs::remove_file(lab.root().join("guests/g/qmp.sock")).expect("its socket");
        }
        let listed = lab.ps("g").expect("listed");
        if step != "thawed" {
            assert_eq!(listed["state"], "frozen", "{step}");
            lab.dewar(&["thaw", "g"]).done();
        }
        assert_whole(&lab, &mut guest, step);
        assert_eq!(common::qemus(&lab).len(), 1, "{step}");
    }
}

/// The new QEMU dies when its guest is loaded: before it runs nothing is lost, if
/// that can be proved; a guest that ran does not begin again from an older state.
#[test]
#[ignore = "long: make test-long"]
fn a_qemu_that_dies_in_a_thaw_loses_the_guest_only_if_it_ran() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    for dewar_dies in [false, true] {
        lab.dewar(&["freeze", "g"]).done();
        let held = HeldCheckpoint::at_with(&lab, &["thaw", "g"], "thawed");
        end_qemu(&lab);
        match dewar_dies {
            true => held.kill(),
            false => {
                let (code, _, said) = held.go_on();
                assert_eq!(code, 1, "{said}");
                assert!(said.contains("stays frozen"), "{said}");
            }
        }
        assert_eq!(lab.ps("g").expect("listed")["state"], "frozen", "{dewar_dies}");
        lab.dewar(&["thaw", "g"]).done();
        assert_whole(&lab, &mut guest, "thawed again");
    }
    // It runs for a moment; and nobody could tell whether it did.
    for (line, step) in
        [(&["freeze", "g"][..], "let run"), (&["freeze", "g", "--no-checksum"], "thawed")]
    {
        lab.dewar(&["checkpoint", "g", "--tag", "kept"]).done();
        lab.dewar(line).done();
        let held = HeldCheckpoint::at_with(&lab, &["thaw", "g"], step);
        if step == "let run" {
            lab.attach("g").expect("its console").console.ask("count").expect("it runs");
        }
        end_qemu(&lab);
        held.kill();
        assert_eq!(lab.ps("g").expect("listed")["state"], "ended", "{step}");
        lab.dewar(&["thaw", "g"]).failed(1, &["is not frozen"]);
        lab.restore(&mut guest, &["kept"]).expect("restore");
        assert_whole(&lab, &mut guest, "restored");
        lab.wait_for_memory("g");
        lab.dewar(&["delete", "kept"]);
    }
}

/// Kills the QEMU that the record names.
fn end_qemu(lab: &Lab) {
    let pid = lab.record("g")["process"]["pid"].as_i64().expect("pid") as i32;
    kill(pid, Signal::KILL);
    dewar_testkit::wait_while_alive(pid);
}

/// One of three fails: it is named, and the others are done.
#[test]
#[ignore = "long: make test-long"]
fn of_all_guests_one_that_fails_keeps_none_of_the_others_back() {
    let lab = common::lab();
    let mut guests = ["a", "b", "c"].map(|name| busy(&lab, name));
    let codes = |told: &Value| {
        let guests = told["guests"].as_array().expect("guests").iter();
        guests.map(|it| it["exit_code"].as_i64().expect("code")).collect::<Vec<_>>()
    };
    let folder = lab.ram_files("b")[0].parent().expect("folder").to_owned();
    let in_the_way = folder.join(format!("{}.state", lab.ram_prefix("b")));
    fs::create_dir(&in_the_way).expect("folder");
    let ran = lab.dewar(&["freeze", "--all"]);
    fs::remove_dir(&in_the_way).expect("folder");
    assert_eq!((ran.code, codes(&ran.json())), (1, vec![0, 1, 0]), "{ran:?}");
    ran.failed(1, &["1 of 3 guests were not frozen"]);
    assert_whole(&lab, &mut guests[1], "not frozen");

    let frozen = lab.record("c");
    let state = frozen["frozen"]["kept"]["in_place"]["state"].as_str().expect("path");
    let right = fs::read(state).expect("state");
    fs::write(state, &right[..right.len() - 1]).expect("cut short");
    let ran = lab.dewar(&["thaw", "--all"]);
    assert_eq!((ran.code, codes(&ran.json())), (1, vec![0, 1]), "{ran:?}");
    assert_eq!(lab.ps("c").expect("listed")["state"], "frozen");
    assert_whole(&lab, &mut guests[0], "thawed");
    fs::write(state, right).expect("as it was");
    lab.dewar(&["thaw", "--all"]).done();
    assert_whole(&lab, &mut guests[2], "thawed later");
}

/// The units for systemd.
fn units() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/systemd")
}

/// The words behind `dewar` in a line of a unit.
fn words_of(unit: &str, key: &str) -> Vec<String> {
    let text = fs::read_to_string(units().join(unit)).expect("unit");
    let start = format!("{key}=/usr/local/bin/dewar ");
    let line = text.lines().find_map(|line| line.strip_prefix(&start)).expect("a line");
    line.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn the_units_are_what_systemd_takes() {
    let folder = tempfile::tempdir().expect("folder");
    let mut command = Command::new("systemd-analyze");
    command.args(["verify", "--man=no"]);
    for unit in fs::read_dir(units()).expect("units") {
        let unit = unit.expect("unit");
        let text = fs::read_to_string(unit.path()).expect("unit");
        let text = text.replace("/usr/local/bin/dewar", env!("CARGO_BIN_EXE_dewar"));
        // Of a template an instance.
        let name = unit.file_name().to_string_lossy().replace('@', "@g");
        fs::write(folder.path().join(&name), text).expect("copy");
        command.arg(folder.path().join(&name));
    }
    match command.output() {
        Ok(told) => {
            let said = String::from_utf8_lossy(&told.stderr);
            assert!(told.status.success() && !said.contains("dewar"), "{said}");
        }
        Err(error) => println!("SKIPPED the_units_are_what_systemd_takes: {error}"),
    }
}

#[test]
fn all_guests_freeze_and_thaw_also_by_way_of_the_store() {
    let lab = common::lab();
    let mut guests = [busy(&lab, "a"), busy(&lab, "b")];
    let in_place = ["freeze", "--all"].map(str::to_owned).to_vec();
    let shutdown = words_of("dewar-freeze.service", "ExecStop");
    let boot = words_of("dewar-thaw.service", "ExecStart");
    let boot: Vec<&str> = boot.iter().map(String::as_str).collect();
    for line in [in_place, shutdown] {
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let told = lab.dewar(&line).done().json();
        assert_eq!(told["done"], 2, "{told}");
        for name in ["a", "b"] {
            let pid = lab.record(name)["process"]["pid"].as_i64().expect("pid") as i32;
            assert!(!is_alive(pid));
        }
        assert_eq!(lab.dewar(&boot).done().json()["done"], 2);
        for guest in &mut guests {
            assert_whole(&lab, guest, &format!("{line:?}"));
            lab.wait_for_memory(&guest.name);
        }
    }
    assert_eq!(lab.dewar(&["thaw", "--all"]).done().json()["done"], 0);
    // All that there is of a guest that is frozen in a store is its checkpoint.
    let told = lab.dewar(&["freeze", "a", "--to-store"]).done().json();
    let image = told["checkpoint"].as_str().expect("checkpoint").to_owned();
    lab.dewar(&["delete", &image]).failed(1, &["all that there is of frozen guest 'a'"]);
    lab.dewar(&["restore", "a"]).failed(1, &["guest 'a' is frozen", "--yes"]);
    lab.dewar(&["run", "a", "--", "qemu-system-x86_64"]).failed(1, &["guest 'a' is frozen"]);
    for step in ["starting QEMU", "loading the devices"] {
        HeldCheckpoint::at_with(&lab, &["thaw", "a"], step).kill();
        let state = lab.ps("a").expect("listed")["state"].clone();
        assert!(state == "frozen" || state == "unfinished", "{step}: {state}");
    }
    assert_eq!(lab.dewar(&["thaw", "--all"]).done().json()["done"], 1);
    assert_whole(&lab, &mut guests[0], "from the store");
}
