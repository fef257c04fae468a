//! What of a reboot of the host can be tried without one. No command here loads or starts a kernel: they are dry runs, and
//! `--thaw` with a note that the test wrote. The rest is in the lab (`crates/cli/tests/hosts/host_reboot.rs`).

use crate::common::{self, HeldCheckpoint};
use dewar_testkit::{Console, GuestSpec, Lab, TestGuest, guest_files, is_alive, wait_until};
use serde_json::{Value, json};
use std::fs;
use std::time::Duration;

fn busy(lab: &Lab, name: &str) -> TestGuest {
    let mut guest = lab.run(name, &GuestSpec::default()).expect("guest");
    guest.console.ask("check 500 1 none").expect("check");
    guest
}

fn assert_goes_on(lab: &Lab, guest: &mut TestGuest, after: &str) {
    wait_until(&format!("{after}: it runs"), Duration::from_secs(30), || {
        lab.ps(&guest.name).expect("listed")["state"] == "running"
    });
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").unwrap_or_else(|error| panic!("{after}: {error}"));
}

/// As a command notes it that has frozen guests; it is no process any more.
fn note(process: &Value, stage: &str, guests: &[&str]) -> Value {
    let mut command = process.clone();
    command["pid"] = json!(4_194_301);
    let guests: Vec<Value> = guests.iter().map(|name| json!({"name": name})).collect();
    json!({"command": command, "stage": stage, "by_init": false, "kernel": "6.12.0", "mounts": [], "guests": guests})
}

/// Guests that a command froze which died before the host was rebooted go on with the next look at them, and those alone:
/// one that its user froze stays so.
#[test]
#[ignore = "long: make test-long"]
fn guests_of_a_reboot_that_did_not_come_go_on() {
    let lab = common::lab();
    let (mut guest, other) = (busy(&lab, "g"), busy(&lab, "other"));
    let process = lab.record("g")["process"].clone();
    let path = lab.root().join("host-reboot.json");
    for stage in ["freezing", "leaving"] {
        lab.dewar(&["freeze", "g"]).done();
        fs::write(&path, note(&process, stage, &["g"]).to_string()).expect("note");
        if stage == "freezing" {
            lab.dewar(&["freeze", "other"]).done();
        }
        assert_goes_on(&lab, &mut guest, stage);
        assert!(!path.exists(), "{stage}");
    }
    assert_eq!(lab.ps("other").expect("listed")["state"], "frozen");
    drop(other);
}

/// One whose memory does not come back stays frozen, and the note stays: the next look tries again.
#[test]
fn a_guest_that_does_not_go_on_is_tried_again() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    lab.dewar(&["freeze", "g"]).done();
    let frozen = lab.record("g");
    let ram = frozen["ram"][0]["path"].as_str().expect("path").to_owned();
    let away = format!("{ram}.away");
    fs::rename(&ram, &away).expect("away");
    let path = lab.root().join("host-reboot.json");
    fs::write(&path, note(&frozen["process"], "leaving", &["g"]).to_string()).expect("note");
    let failed = lab.dewar(&["ps"]);
    assert_ne!(failed.code, 0, "{failed:?}");
    assert!(failed.stdout.contains("frozen") && path.exists(), "{failed:?}");
    fs::rename(&away, &ram).expect("back");
    assert_goes_on(&lab, &mut guest, "its memory is there again");
    assert!(!path.exists());
}

/// A note that cannot be read does not keep `ps` from telling of the guests.
#[test]
fn a_damaged_note_hides_no_guest() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    fs::write(lab.root().join("host-reboot.json"), "{").expect("note");
    let told = lab.dewar(&["ps"]);
    assert_eq!(told.json()["guests"][0]["state"], "running", "{told:?}");
    assert!(told.stderr.contains("host-reboot.json"), "{told:?}");
    fs::remove_file(lab.root().join("host-reboot.json")).expect("removed");
    assert_goes_on(&lab, &mut guest, "the note is gone");
}

/// The same, of a boot before this one: the host was rebooted.
fn note_of_earlier_boot(process: &Value, guests: &[&str]) -> Value {
    let mut earlier = note(process, "leaving", guests);
    let boot = process["boot"].as_u64().expect("boot");
    earlier["command"]["boot"] = json!(boot ^ 1);
    earlier
}

/// After a boot guests are thawed once, whatever becomes of the command that does it: one that runs already is left alone,
/// the others go on.
#[test]
fn a_thaw_after_a_boot_that_is_killed_is_finished_by_the_next() {
    let lab = common::lab();
    let (mut guest, mut other) = (busy(&lab, "g"), busy(&lab, "other"));
    let path = lab.root().join("host-reboot.json");
    for step in ["none", "thawed", "let run"] {
        let process = lab.record("g")["process"].clone();
        for name in ["g", "other"] {
            lab.dewar(&["freeze", name]).done();
        }
        let note = note_of_earlier_boot(&process, &["g", "other"]);
        fs::write(&path, note.to_string()).expect("note");
        if step == "none" {
            let back = lab.dewar(&["host-reboot", "--thaw"]).done().json();
            assert!(
                back["guests"].as_array().expect("guests").iter().all(|it| it["state"] == "back"),
                "{back}"
            );
            let told = lab.ps("g").expect("listed");
            assert!(told["host_reboot_outage_ms"].as_u64() > Some(0), "{told}");
        } else {
            HeldCheckpoint::at_with(&lab, &["host-reboot", "--thaw"], step).kill();
            let before = ["g", "other"].map(|name| lab.record(name));
            let back = lab.dewar(&["host-reboot", "--thaw"]).done().json();
            let states = back["guests"].as_array().expect("guests").iter().map(|it| &it["state"]);
            let mut ran = 0;
            for (state, before) in states.zip(before) {
                assert!(state == "back" || state == "running", "{step}: {back}");
                let now = lab.record(before["name"].as_str().expect("name"));
                if state == "running" {
                    ran += 1;
                    assert_eq!(now["process"], before["process"], "{step}: not thawed twice");
                }
            }
            assert!(ran > 0, "{step}: {back}");
        }
        assert_goes_on(&lab, &mut guest, step);
        assert_goes_on(&lab, &mut other, step);
        let again = lab.dewar(&["host-reboot", "--thaw"]).done().json();
        assert_eq!(again["guests"], json!([]), "{step}: it is done");
    }
}

/// One whose memory did not outlive the boot goes on from the checkpoint that was taken for this case, and not again from it
/// where the command died before it noted that.
#[test]
fn a_guest_whose_memory_is_lost_goes_on_from_its_checkpoint_once() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let taken = lab.dewar(&["checkpoint", "g"]).done().json();
    let record = lab.record("g");
    lab.dewar(&["freeze", "g"]).done();
    fs::remove_file(record["ram"][0]["path"].as_str().expect("path")).expect("lost");
    let mut lost = note_of_earlier_boot(&record["process"], &["g"]);
    lost["guests"][0]["fallback"] = taken["checkpoint"].clone();
    let mut restored = None;
    for round in ["lost", "dealt with"] {
        fs::write(lab.root().join("host-reboot.json"), lost.to_string()).expect("note");
        let told = lab.dewar(&["host-reboot", "--thaw"]);
        assert_eq!(told.code, 5, "{round}: it is not as it was: {told:?}");
        assert_eq!(told.json()["guests"][0]["state"], "restored", "{round}: {told:?}");
        assert_goes_on(&lab, &mut guest, round);
        let process = lab.pid("g");
        assert_eq!(*restored.get_or_insert(process), process, "{round}");
    }
}

/// Two that come at once, a unit's and its user's: one does it, the other is told that one is at work.
#[test]
fn two_thaws_after_a_boot_do_it_once() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let process = lab.record("g")["process"].clone();
    lab.dewar(&["freeze", "g"]).done();
    fs::write(
        lab.root().join("host-reboot.json"),
        note_of_earlier_boot(&process, &["g"]).to_string(),
    )
    .expect("note");
    let held = HeldCheckpoint::at_with(&lab, &["host-reboot", "--thaw"], "thawed");
    lab.dewar(&["host-reboot", "--thaw"]).failed(1, &["at work"]);
    let (code, _, told) = held.go_on();
    assert_eq!(code, 0, "{told}");
    assert_goes_on(&lab, &mut guest, "two thaws");
    assert_eq!(lab.dewar(&["host-reboot", "--thaw"]).done().json()["guests"], json!([]));
}

/// Where the note cannot be written the guests go on all the same, and the next command notes it.
#[test]
fn a_note_that_cannot_be_written_after_a_boot_keeps_no_guest_waiting() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let process = lab.record("g")["process"].clone();
    lab.dewar(&["freeze", "g"]).done();
    let path = lab.root().join("host-reboot.json");
    fs::write(&path, note_of_earlier_boot(&process, &["g"]).to_string()).expect("note");
    // What is written in its place cannot be: a folder has its name.
    let part = lab.root().join("host-reboot.json.part");
    fs::create_dir(&part).expect("in the way");
    lab.dewar(&["host-reboot", "--thaw"]).failed(1, &["host-reboot.json"]);
    fs::remove_dir(&part).expect("out of the way");
    assert_goes_on(&lab, &mut guest, "no room");
    let noted = lab.dewar(&["host-reboot", "--thaw"]).done().json();
    assert_eq!(noted["guests"][0]["state"], "running", "{noted}");
    assert_goes_on(&lab, &mut guest, "noted");
}

/// A plan names each guest that would be lost, and what to do; nothing is touched.
#[test]
fn a_plan_tells_what_would_be_lost() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let kernel = guest_files().expect("files").1.with_file_name("vmlinuz");
    let kernel = kernel.display().to_string();
    let plan = |more: &[&str]| {
        let words = ["host-reboot", "--dry-run", "--now", "--kernel", &kernel, "--append", "quiet"];
        lab.dewar(&[&words[..], more].concat())
    };
    let lost =
        plan(&[]).failed(4, &["'g' cannot be kept", "--others store", "no guest was touched"]);
    assert!(
        lost.json()["refusals"].to_string().contains("the memory of 'g' cannot be kept"),
        "{lost:?}"
    );
    // Whatever else this host lacks: with that the guest is in nobody's way.
    let stored = plan(&["--others", "store"]);
    let told = stored.json();
    assert_eq!(told["guests"][0]["how"], "store", "{stored:?}");
    assert!(!told["refusals"].to_string().contains("'g'"), "{told}");
    lab.dewar(&["freeze", "g"]).done();
    plan(&["--others", "store"]).failed(4, &["'g' is frozen, and its memory would be lost"]);
    lab.dewar(&["thaw", "g"]).done();
    assert_goes_on(&lab, &mut guest, "plans");
    lab.dewar(&["host-reboot", "--dry-run", "--kernel", "/etc/passwd"])
        .failed(1, &["no Linux kernel"]);
    lab.dewar(&["host-reboot", "--reuse", "--append", "x"]).failed(2, &["--append"]);
    let nothing = lab.dewar(&["host-reboot", "--thaw"]).done();
    assert_eq!(nothing.json()["rebooted"], false, "{nothing:?}");
}

/// A guest whose memory has no name, as after a live update: a link leads to its QEMU. It is checkpointed and frozen as any,
/// and has a name afterwards; a freeze that fails leaves it as it was.
#[test]
#[ignore = "long: make test-long"]
fn memory_without_a_name_is_a_guests_as_any() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let before = lab.record("g");
    let path = before["ram"][0]["path"].as_str().expect("path").to_owned();
    let pid = before["process"]["pid"].as_i64().expect("pid");
    let own = fs::metadata(&path).expect("RAM");
    let has_it = |fd: &fs::DirEntry| {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(fd.path()).is_ok_and(|data| data.ino() == own.ino() && data.dev() == own.dev())
    };
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").flatten();
    let fd = fds.into_iter().find(has_it).expect("QEMU has it open").path();
    fs::remove_file(&path).expect("its name");
    std::os::unix::fs::symlink(&fd, &path).expect("a link");
    for _ in 0..2 {
        lab.dewar(&["checkpoint", "g"]).done();
    }
    lab.dewar(&["verify", "g"]).done();
    lab.dewar(&["upgrade", "g", "--yes"]).failed(4, &["has no name", "dewar freeze g"]);
    let link = || fs::read_link(&path).is_ok_and(|target| target == fd);
    assert!(link(), "it is as it was");
    // No folder can be removed to write the sums in: a folder is in their way.
    let sums = lab.root().join("guests/g/sums.json.part");
    fs::create_dir(&sums).expect("in the way");
    assert_ne!(lab.dewar(&["freeze", "g"]).code, 0);
    fs::remove_dir(&sums).expect("out of the way");
    assert!(link() && is_alive(pid as i32), "a freeze that failed leaves it as it was");
    assert_goes_on(&lab, &mut guest, "a freeze failed");
    lab.dewar(&["freeze", "g"]).done();
    assert!(fs::symlink_metadata(&path).expect("RAM").is_file(), "it has a name");
    lab.dewar(&["thaw", "g"]).done();
    assert_goes_on(&lab, &mut guest, "frozen and thawed");
    lab.dewar(&["upgrade", "g", "--yes"]).done();
    assert_goes_on(&lab, &mut guest, "upgraded");
}
