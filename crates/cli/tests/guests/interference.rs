//! A guest's user goes on using QEMU while Dewar works on the guest: what the user did
//! stays done, and what cannot be right then is no checkpoint.

use crate::common::{self, HeldCheckpoint, image_hashes, page_hashes, ram_now};
use dewar_guest_qemu::Qmp;
use dewar_image::ImageId;
use dewar_testkit::{
    Console, GuestSpec, Lab, SmallDisk, TestGuest, is_alive, kill, wait_until, wait_while_alive,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;

/// A guest and its user's own connection to QEMU.
fn guest(lab: &Lab, more: &[&str]) -> (TestGuest, Qmp) {
    let socket = lab.path().join("user-qmp");
    let user = format!("unix:{},server=on,wait=off", socket.display());
    let extra = ["-qmp", &user].iter().chain(more).map(|word| (*word).to_owned()).collect();
    let mut guest = lab.run("g", &GuestSpec { extra, ..GuestSpec::default() }).expect("guest");
    guest.console.ask("check 2000 1 disk").expect("check");
    (guest, Qmp::connect(&socket).expect("QMP"))
}

fn ask(qmp: &mut Qmp, command: &str, arguments: Value) -> Value {
    qmp.execute(command, arguments).expect(command)
}

fn status(qmp: &mut Qmp) -> String {
    ask(qmp, "query-status", json!({}))["status"].as_str().expect("status").to_owned()
}

fn migration(qmp: &mut Qmp) -> String {
    ask(qmp, "query-migrate", json!({}))["status"].as_str().unwrap_or("none").to_owned()
}

#[test]
#[ignore = "long: make test-long"]
fn who_is_stopped_or_let_run_meanwhile_stays_so() {
    let lab = common::lab();
    let (mut guest, mut user) = guest(&lab, &[]);
    let held = HeldCheckpoint::at(&lab, "g", "bulk-done");
    ask(&mut user, "stop", json!({}));
    let (code, _, said) = held.go_on();
    assert!(code == 1 && said.contains("somebody stopped it"), "{code}: {said}");
    assert_eq!(status(&mut user), "paused");

    let held = HeldCheckpoint::at(&lab, "g", "bulk-done");
    ask(&mut user, "cont", json!({}));
    let (code, _, said) = held.go_on();
    assert!(code == 1 && said.contains("somebody let it run"), "{code}: {said}");
    assert_eq!(status(&mut user), "running");

    // In the pause itself: what was captured is not of one instant.
    for step in ["stopped", "state-saved", "captured"] {
        let held = HeldCheckpoint::at(&lab, "g", step);
        ask(&mut user, "cont", json!({}));
        std::thread::sleep(Duration::from_millis(300));
        let (code, _, said) = held.go_on();
        assert!(code == 1 && said.contains("no checkpoint was made"), "{step}: {code}: {said}");
        assert_eq!(status(&mut user), "running", "{step}");
    }
    guest.console.ask("verify").expect("consistent");

    // Reset while it stands still, it is let run all the same: it boots.
    let held = HeldCheckpoint::at(&lab, "g", "state-saved");
    ask(&mut user, "system_reset", json!({}));
    wait_until("the reset", Duration::from_secs(5), || status(&mut user) == "prelaunch");
    let (_, _, said) = held.go_on();
    assert_eq!(status(&mut user), "running", "{said}");

    // A command that finds an old journal does not let run what the user has stopped.
    let held = HeldCheckpoint::at(&lab, "g", "bulk-done");
    let guardian = held.guardian().expect("guardian");
    kill(guardian, Signal::KILL);
    // It has the guest's lock, too.
    wait_while_alive(guardian);
    held.kill();
    ask(&mut user, "stop", json!({}));
    assert_eq!(lab.ps("g").expect("listed")["state"], "paused");
    assert!(!lab.root().join("guests/g/journal.json").exists());
    ask(&mut user, "cont", json!({}));
    lab.dewar(&["checkpoint", "g"]).done();
}

#[test]
#[ignore = "long: make test-long"]
fn a_migration_of_its_users_is_left_alone() {
    let lab = common::lab();
    let (mut guest, mut user) = guest(&lab, &[]);
    guest.console.ask("fill 64 noise").expect("fill");
    let slow = json!({"max-bandwidth": 100_000});
    let nowhere = json!({"uri": "exec:cat >/dev/null"});
    ask(&mut user, "migrate-set-parameters", slow);
    ask(&mut user, "migrate", nowhere.clone());
    wait_until("a migration", Duration::from_secs(5), || migration(&mut user) == "active");
    for line in [&["checkpoint", "g"][..], &["upgrade", "g", "--yes"], &["freeze", "g"]] {
        lab.dewar(line).failed(4, &["a migration of it is under way"]);
        assert_eq!(migration(&mut user), "active", "{line:?}");
    }
    let cancel = |user: &mut Qmp| {
        ask(user, "migrate_cancel", json!({}));
        wait_until("its end", Duration::from_secs(20), || migration(user) == "cancelled");
    };
    cancel(&mut user);
    // And one that begins while Dewar is at work.
    for (verb, step) in
        [("checkpoint", "bulk-done"), ("upgrade", "armed"), ("freeze", "stopping the guest")]
    {
        let held = HeldCheckpoint::at_with(&lab, &[verb, "g"], step);
        ask(&mut user, "migrate", nowhere.clone());
        let (code, _, said) = held.go_on();
        let is_told = said.contains("a migration of it is under way");
        assert!(code != 0 && is_told, "{verb}: {code}: {said}");
        // Asked for, it may still be setting itself up.
        wait_until(verb, Duration::from_secs(5), || migration(&mut user) == "active");
        cancel(&mut user);
    }

    // One that is over before we would have stopped it: all of it went, and it
    // does not run here again.
    let fast = json!({"max-bandwidth": 1u64 << 40});
    ask(&mut user, "migrate-set-parameters", fast);
    let held = HeldCheckpoint::at(&lab, "g", "bulk-done");
    ask(&mut user, "migrate", nowhere);
    wait_until("its end", Duration::from_secs(60), || migration(&mut user) == "completed");
    let sent = ask(&mut user, "query-migrate", json!({}))["ram"]["transferred"].as_u64();
    assert!(sent > Some(64 << 20), "{sent:?}");
    let (code, _, said) = held.go_on();
    assert!(code != 0, "{said}");
    assert_eq!(status(&mut user), "postmigrate");
    lab.dewar(&["ps"]);
    assert_eq!(status(&mut user), "postmigrate");
    ask(&mut user, "cont", json!({}));
    guest.console.ask("verify").expect("consistent");
    lab.dewar(&["checkpoint", "g"]).done();
}

#[test]
#[ignore = "long: make test-long"]
fn a_disk_that_is_unplugged_meanwhile_keeps_what_was_written() {
    let lab = common::lab();
    let disk = lab.path().join("unplugged.qcow2");
    let path = disk.display().to_string();
    let line = ["create", "-q", "-f", "qcow2", &path, "64M"];
    assert!(Command::new("qemu-img").args(line).status().expect("qemu-img").success());
    let drive = format!("if=none,id=d9,format=qcow2,file={path}");
    let devices =
        ["-device", "virtio-scsi-pci", "-drive", &drive, "-device", "scsi-hd,drive=d9,id=s9"];
    let (mut guest, mut user) = guest(&lab, &devices);
    let held = HeldCheckpoint::at(&lab, "g", "resumed");
    let line = json!({"command-line": "qemu-io d9 \"write -P 171 0 64k\""});
    let told = ask(&mut user, "human-monitor-command", line).to_string();
    assert!(!told.to_lowercase().contains("error"), "{told}");
    ask(&mut user, "device_del", json!({"id": "s9"}));
    wait_until("the disk's end", Duration::from_secs(10), || {
        !ask(&mut user, "query-block", json!({})).to_string().contains("scsi")
            && !ask(&mut user, "query-block", json!({})).to_string().contains("s9")
    });
    let (code, _, said) = held.go_on();
    println!("the checkpoint ended with {code}: {said}");
    assert!(!lab.root().join("guests/g/journal.json").exists());
    assert!(!disk.with_extension("qcow2.dewar-overlay").exists());
    let read =
        Command::new("qemu-io").args(["-r", "-U", "-c", "read -P 171 0 64k", &path]).output();
    let read = String::from_utf8_lossy(&read.expect("qemu-io").stdout).into_owned();
    assert!(read.contains("65536/65536") && !read.contains("verification failed"), "{read}");
    guest.console.ask("verify").expect("consistent");
}

/// The block node on which the guest's disk stands.
fn disk_node(user: &mut Qmp) -> Value {
    let blocks = ask(user, "query-block", json!({}));
    let disk = blocks.as_array().into_iter().flatten().find(|it| it["inserted"]["ro"] == false);
    disk.expect("a disk")["inserted"]["node-name"].clone()
}

/// Puts an overlay that names no backing file on top of the guest's disk.
fn snapshot(lab: &Lab, user: &mut Qmp) {
    let path = lab.path().join("snapshot.qcow2").display().to_string();
    let _ = std::fs::remove_file(&path);
    let line = ["create", "-q", "-f", "qcow2", &path, "64M"];
    assert!(Command::new("qemu-img").args(line).status().expect("qemu-img").success());
    let node = disk_node(user);
    let overlay = json!({"driver": "qcow2", "node-name": "snap", "backing": null,
        "file": {"driver": "file", "filename": path}});
    ask(user, "blockdev-add", overlay);
    ask(user, "blockdev-snapshot", json!({"node": node, "overlay": "snap"}));
}

/// Takes the overlay away again, with what was written to it.
fn commit(user: &mut Qmp) {
    assert_eq!(disk_node(user), "snap");
    let job = json!({"job-id": "c", "device": "snap", "auto-dismiss": true});
    ask(user, "block-commit", job);
    let jobs = |user: &mut Qmp| ask(user, "query-jobs", json!({})).to_string();
    wait_until("the commit", Duration::from_secs(20), || jobs(user).contains("\"ready\""));
    ask(user, "job-complete", json!({"id": "c"}));
    wait_until("its end", Duration::from_secs(20), || jobs(user) == "[]");
    ask(user, "blockdev-del", json!({"node-name": "snap"}));
}

#[test]
#[ignore = "long: make test-long"]
fn a_snapshot_that_its_user_takes_is_not_left_behind() {
    let lab = common::lab();
    let (mut guest, mut user) = guest(&lab, &[]);
    let pid = lab.pid("g");
    // One that is there before is followed.
    snapshot(&lab, &mut user);
    lab.dewar(&["checkpoint", "g"]).done();
    assert_eq!(disk_node(&mut user), "snap");
    guest.console.ask("verify").expect("consistent");
    commit(&mut user);
    // And where it is taken while Dewar is at work.
    for (verb, step) in [("upgrade", "armed"), ("freeze", "stopping the guest")] {
        let held = HeldCheckpoint::at_with(&lab, &[verb, "g"], step);
        snapshot(&lab, &mut user);
        let (code, _, said) = held.go_on();
        assert!(code == 4 && said.contains("changed meanwhile"), "{verb}: {code}: {said}");
        assert_eq!(lab.pid("g"), pid);
        assert_eq!(lab.ps("g").expect("listed")["state"], "running");
        guest.console.ask("verify").expect("consistent");
        commit(&mut user);
    }
    let held = HeldCheckpoint::at(&lab, "g", "bulk-done");
    snapshot(&lab, &mut user);
    let (code, _, said) = held.go_on();
    assert!(code == 1 && said.contains("was changed meanwhile"), "{code}: {said}");
    assert_eq!(disk_node(&mut user), "snap");
    guest.console.ask("verify").expect("consistent");
    commit(&mut user);
    lab.dewar(&["checkpoint", "g"]).done();
    let file = lab.path().join("g/disk0.qcow2").display().to_string();
    let drive = format!("if=virtio,snapshot=on,file={file}");
    let qemu = dewar_testkit::qemu();
    lab.dewar(&["run", "other", "--", &qemu, "-drive", &drive]).failed(4, &["snapshot=on"]);
}

#[test]
#[ignore = "long: make test-long"]
fn a_device_that_comes_in_the_middle_is_in_no_checkpoint() {
    let lab = common::lab();
    let devices = ["-device", "qemu-xhci", "-device", "virtio-scsi-pci"];
    let (mut guest, mut user) = guest(&lab, &devices);
    // A disk that came before is no hindrance, though its node is another meanwhile.
    let late = lab.path().join("late.qcow2").display().to_string();
    let line = ["create", "-q", "-f", "qcow2", &late, "16M"];
    assert!(Command::new("qemu-img").args(line).status().expect("qemu-img").success());
    let node = json!({"driver": "qcow2", "node-name": "late",
        "file": {"driver": "file", "filename": late}});
    ask(&mut user, "blockdev-add", node);
    ask(&mut user, "device_add", json!({"driver": "scsi-hd", "id": "d", "drive": "late"}));
    lab.dewar(&["checkpoint", "g"]).done();
    let held = HeldCheckpoint::at(&lab, "g", "bulk-done");
    ask(&mut user, "device_add", json!({"driver": "usb-tablet", "id": "t"}));
    let (code, _, said) = held.go_on();
    assert!(code == 1 && said.contains("they were changed meanwhile"), "{code}: {said}");
    assert_eq!(lab.ps("g").expect("listed")["state"], "running");
    guest.console.ask("verify").expect("consistent");
    lab.dewar(&["checkpoint", "g", "--tag", "t"]).done();
    lab.crash("g");
    lab.restore(&mut guest, &["t"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_with_a_cd_moves_and_freezes() {
    let lab = common::lab();
    let medium = lab.path().join("cd.iso");
    std::fs::write(&medium, vec![7; 1 << 20]).expect("medium");
    let (mut guest, _user) = guest(&lab, &["-cdrom", &medium.display().to_string()]);
    lab.dewar(&["upgrade", "g"]).done();
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).done();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
}

/// A disk for the journals, and nothing else of the guest.
fn journals_disk(lab: &Lab) -> SmallDisk {
    SmallDisk::mount(&lab.root(), "8m").expect("small disk")
}

/// Takes a checkpoint during which that gets full, when the disks are copied; returns its
/// guardian.
fn fill_in_a_checkpoint(lab: &Lab, line: &[&str], small: &SmallDisk) -> i32 {
    let held = HeldCheckpoint::at_with(lab, line, "disks-copied");
    let guardian = held.guardian().expect("guardian");
    small.fill().expect("full");
    let (code, _, said) = held.go_on();
    assert!([1, 5].contains(&code) && said.contains("No space left"), "{code}: {said}");
    guardian
}

#[test]
#[ignore = "long: make test-long"]
fn a_full_disk_does_not_keep_a_guest_from_its_own() {
    let lab = common::lab();
    let small = journals_disk(&lab);
    let (mut guest, _user) = guest(&lab, &[]);
    let store = format!("file:{}/elsewhere", lab.path().display());
    let line = ["checkpoint", "g", "--store", &store];
    let guardian = fill_in_a_checkpoint(&lab, &line, &small);
    // Its writers of the disk answer, too.
    guest.console.ask("verify").expect("consistent");
    small.free().expect("room");
    kill(guardian, Signal::KILL);
    wait_until("the guardian's end", Duration::from_secs(20), || !is_alive(guardian));
    lab.dewar(&["ps"]).done();
    assert!(!lab.root().join("guests/g/journal.json").exists());
    guest.console.ask("verify").expect("consistent");
    lab.dewar(&line).done();
    lab.dewar(&["rm", "g", "--force"]).done();
    drop(small);
}

/// An upgrade that cannot be noted as done: the guest has moved all the same, and one QEMU is
/// left of it.
#[test]
fn a_full_disk_leaves_one_qemu_of_a_guest_that_has_moved() {
    let lab = common::lab();
    let small = journals_disk(&lab);
    let (mut guest, user) = guest(&lab, &[]);
    let old = user.peer_pid().expect("pid");
    drop(user);
    let held = HeldCheckpoint::at_with(&lab, &["upgrade", "g", "--yes"], "resumed");
    small.fill().expect("full");
    let (code, _, said) = held.go_on();
    assert!(code == 5 && said.contains("No space left"), "{code}: {said}");
    assert!(!is_alive(old), "nobody lets that one run");
    small.free().expect("room");
    wait_until("it is settled", Duration::from_secs(30), || {
        lab.ps("g").is_some_and(|it| it["state"] == "running")
            && !lab.root().join("guests/g/handover.json").exists()
    });
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
    let store = format!("file:{}/elsewhere", lab.path().display());
    lab.dewar(&["checkpoint", "g", "--store", &store]).done();
    lab.dewar(&["rm", "g", "--force"]).done();
    drop(small);
}

/// The same where QEMU dies before there is room again: the overlay is the newest still.
#[test]
#[ignore = "long: make test-long"]
fn a_full_disk_loses_nothing_of_a_guest_that_dies_then() {
    let lab = common::lab();
    let small = journals_disk(&lab);
    let (guest, mut user) = guest(&lab, &[]);
    let store = format!("file:{}/elsewhere", lab.path().display());
    let guardian = fill_in_a_checkpoint(&lab, &["checkpoint", "g", "--store", &store], &small);
    for command in ["write -P 171 62M 64k", "flush"] {
        let line = json!({"command-line": format!("qemu-io virtio0 \"{command}\"")});
        let told = ask(&mut user, "human-monitor-command", line).to_string();
        assert!(!told.to_lowercase().contains("error"), "{told}");
    }
    let pid = lab.pid("g").or(user.peer_pid().ok()).expect("pid");
    kill(guardian, Signal::KILL);
    kill(pid, Signal::KILL);
    wait_until("their end", Duration::from_secs(20), || !is_alive(guardian) && !is_alive(pid));
    small.free().expect("room");
    lab.dewar(&["ps"]).done();
    let disk = guest.folder.join("disk0.qcow2");
    assert!(!guest.folder.join("disk0.qcow2.dewar-overlay").exists());
    let read =
        Command::new("qemu-io").args(["-r", "-c", "read -P 171 62M 64k"]).arg(&disk).output();
    let read = String::from_utf8_lossy(&read.expect("qemu-io").stdout).into_owned();
    assert!(read.contains("65536/65536") && !read.contains("verification failed"), "{read}");
    drop(small);
}

#[test]
#[ignore = "long: make test-long"]
fn a_commit_that_somebody_began_is_ended_or_begun_again() {
    let lab = common::lab();
    let (mut guest, mut user) = guest(&lab, &[]);
    let job = json!({"id": "dewar-commit-0"});
    // As by commands that were killed at once after the last of these; the third had no
    // room for its journal.
    let steps = [("ready", "job-complete"), ("pending", "job-cancel")];
    for done in 0..=steps.len() {
        let held = HeldCheckpoint::at(&lab, "g", "disks-copied");
        let guardian = held.guardian().expect("guardian");
        kill(guardian, Signal::KILL);
        held.kill();
        wait_until("its end", Duration::from_secs(20), || !is_alive(guardian));
        let commit = json!({
            "job-id": job["id"], "device": "dewar-overlay-0",
            "auto-finalize": false, "auto-dismiss": false,
        });
        ask(&mut user, "block-commit", commit);
        for (state, then) in &steps[..done] {
            wait_until(state, Duration::from_secs(20), || {
                ask(&mut user, "query-jobs", json!({}))[0]["status"] == *state
            });
            ask(&mut user, then, job.clone());
        }
        lab.dewar(&["ps"]).done();
        assert!(!lab.root().join("guests/g/journal.json").exists(), "{done}");
        guest.console.ask("verify").expect("consistent");
    }
    lab.dewar(&["checkpoint", "g"]).done();
}

/// An overlay is as large as its disk was: what the guest writes beyond would fail.
#[test]
fn a_disk_that_grows_meanwhile_is_not_made_smaller() {
    let lab = common::lab();
    let (mut guest, mut user) = guest(&lab, &[]);
    let node = disk_node(&mut user);
    let size = |user: &mut Qmp| {
        let blocks = ask(user, "query-block", json!({}));
        let mut all = blocks.as_array().into_iter().flatten();
        let disk = all.find(|it| it["inserted"]["ro"] == false).expect("a disk");
        disk["inserted"]["image"]["virtual-size"].as_u64().expect("size")
    };
    let grown = size(&mut user) + (64 << 20);
    let held = HeldCheckpoint::at(&lab, "g", "bulk-done");
    ask(&mut user, "block_resize", json!({"node-name": node, "size": grown}));
    let (code, _, said) = held.go_on();
    assert!(code == 1 && said.contains("was changed meanwhile"), "{code}: {said}");
    assert_eq!(size(&mut user), grown);
    assert_eq!(disk_node(&mut user), node);
    guest.console.ask("verify").expect("consistent");
    lab.dewar(&["checkpoint", "g"]).done();
    assert_eq!(size(&mut user), grown);
}

/// Limits and ways of a migration that are its user's hold for the user's migrations, not for
/// the pause.
#[test]
#[ignore = "long: make test-long"]
fn settings_of_migrations_keep_nobody_waiting_in_the_pause() {
    let lab = common::lab();
    // Sixteen megabytes that are saved in the pause.
    let (mut guest, mut user) = guest(&lab, &["-device", "bochs-display"]);
    let limit =
        |user: &mut Qmp| ask(user, "query-migrate-parameters", json!({}))["max-bandwidth"].clone();
    let on = |name: &str| json!({"capability": name, "state": true});
    let set = json!({"capabilities": [on("postcopy-ram"), on("postcopy-preempt")]});
    ask(&mut user, "migrate-set-parameters", json!({"max-bandwidth": 100_000}));
    ask(&mut user, "migrate-set-capabilities", set);
    let capabilities = |user: &mut Qmp| ask(user, "query-migrate-capabilities", json!({}));
    let before = capabilities(&mut user);
    drop(user);
    for line in [["checkpoint", "g"], ["upgrade", "g"]] {
        lab.dewar(&line).done();
        let mut user = Qmp::connect(&lab.path().join("user-qmp")).expect("QMP");
        assert_eq!(limit(&mut user), 100_000, "{line:?}");
        assert_eq!(capabilities(&mut user), before, "{line:?}");
    }
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).done();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
}

/// Somebody removes what Dewar noted, while a disk's writes go elsewhere or the guest
/// stands still: it is put back all the same.
#[test]
fn a_journal_that_is_taken_away_leaves_no_disk_behind() {
    let lab = common::lab();
    let (mut guest, mut user) = guest(&lab, &[]);
    let store = format!("file:{}/elsewhere", lab.path().display());
    let folder = lab.root().join("guests/g");
    let own = disk_node(&mut user);
    for (step, all) in [("state-saved", false), ("resumed", false), ("resumed", true)] {
        let held = HeldCheckpoint::at_with(&lab, &["checkpoint", "g", "--store", &store], step);
        match all {
            true => std::fs::remove_dir_all(&folder).expect("remove"),
            false => std::fs::remove_file(folder.join("journal.json")).expect("remove"),
        }
        let (code, _, said) = held.go_on();
        println!("{step}, {all}: {code}: {said}");
        assert_eq!(status(&mut user), "running", "{step}");
        assert_eq!(disk_node(&mut user), own, "{step}");
        assert!(!guest.folder.join("disk0.qcow2.dewar-overlay").exists(), "{step}");
        assert!(!folder.join("journal.json").exists(), "{step}");
        guest.console.ask("verify").expect("consistent");
    }
    kill(user.peer_pid().expect("pid"), Signal::KILL);
}

#[test]
#[ignore = "long: make test-long"]
fn a_server_whose_restore_died_serves_no_other_guest() {
    let lab = common::lab();
    let (mut guest, _user) = guest(&lab, &[]);
    guest.console.ask("fill 64 noise").expect("fill");
    let id = |told: &str| -> String {
        let told: Value = serde_json::from_str(told).expect("JSON");
        told["checkpoint"].as_str().expect("id").to_owned()
    };
    let first = id(&lab.dewar(&["checkpoint", "g"]).done().stdout);
    guest.console.ask("fill 96 noise").expect("fill");
    let second = id(&lab.dewar(&["checkpoint", "g", "--full"]).done().stdout);
    lab.crash("g");
    let held = HeldCheckpoint::at_with(&lab, &["restore", &first], "starting QEMU");
    let orphan = held.started("__serve").expect("a page server");
    kill(orphan, Signal::STOP);
    kill(held.pid, Signal::CONT);
    let record = lab.root().join("guests/g/guest.json");
    wait_until("a QEMU", Duration::from_secs(20), || {
        std::fs::read_to_string(&record).is_ok_and(|text| text.contains("\"restoring\""))
    });
    // It has told the server to go on.
    std::thread::sleep(Duration::from_millis(300));
    held.kill();
    let restore = HeldCheckpoint::at_with(&lab, &["restore", &second, "--paused"], "loaded");
    kill(orphan, Signal::CONT);
    wait_until("the server's end", Duration::from_secs(20), || !is_alive(orphan));
    let (code, _, said) = restore.go_on();
    assert_eq!(code, 0, "{said}");
    lab.wait_for_memory("g");
    let ram = page_hashes(&ram_now(&lab, "g"));
    let saved = image_hashes(&lab, &ImageId(second));
    let wrong = (0..ram.len()).filter(|page| saved[*page] != ram[*page]).count();
    assert_eq!(wrong, 0, "pages that are not the checkpoint's");
}
