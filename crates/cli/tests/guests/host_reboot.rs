//! What of a reboot of the host can be tried without one. No test here may start another kernel: each command is a dry run,
//! or a look. The rest is in the lab (`crates/cli/tests/hosts/host_reboot.rs`).

use crate::common;
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

fn record(lab: &Lab, name: &str) -> Value {
    let path = lab.root().join("guests").join(name).join("guest.json");
    serde_json::from_slice(&fs::read(path).expect("record")).expect("JSON")
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
fn guests_of_a_reboot_that_did_not_come_go_on() {
    let lab = common::lab();
    let (mut guest, other) = (busy(&lab, "g"), busy(&lab, "other"));
    let process = record(&lab, "g")["process"].clone();
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
    let frozen = record(&lab, "g");
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
fn memory_without_a_name_is_a_guests_as_any() {
    let lab = common::lab();
    let mut guest = busy(&lab, "g");
    let before = record(&lab, "g");
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
