//! Guests with what QEMU gives a machine by itself: they have it afterwards, too, and
//! nothing else.

use crate::common;
use crate::upgrade_devices::unplug;
use dewar_guest_qemu::Qmp;
use dewar_testkit::{Console, GuestSpec, Lab, TestGuest, next_qemu, qemu, wait_until};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What QEMU may make by itself, as it calls it.
const OWN: [&str; 7] = ["VGA", "cirrus-vga", "e1000", "e1000e", "ide-cd", "floppy", "isa-parallel"];

fn user_socket(lab: &Lab) -> PathBuf {
    lab.path().join("user.qmp")
}

fn run(lab: &Lab, extra: &[&str]) -> TestGuest {
    let user = format!("unix:{},server=on,wait=off", user_socket(lab).display());
    let extra = extra.iter().chain(&["-qmp", &user]).map(|word| (*word).to_owned()).collect();
    let spec = GuestSpec { extra, defaults: true, ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("check 2000 1 disk").expect("check");
    guest
}

fn ask(lab: &Lab, command: &str, arguments: Value) -> Value {
    let mut qmp = Qmp::connect(&user_socket(lab)).expect("QMP");
    qmp.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
}

/// Those of [`OWN`] that the guest has now.
fn own(lab: &Lab) -> Vec<String> {
    let all = ask(lab, "qom-list", json!({"path": "/machine/unattached"}));
    let kinds = all.as_array().expect("list").iter().filter_map(|it| it["type"].as_str());
    let is = |kind: &&str| OWN.iter().any(|own| *kind == format!("child<{own}>"));
    let mut own: Vec<String> = kinds.filter(is).map(str::to_owned).collect();
    own.sort();
    own
}

/// Brings the guest by each way to another QEMU; it is whole, and has what it had.
fn assert_kept(lab: &Lab, guest: &mut TestGuest, what: &str, had: &[String]) {
    let other = next_qemu().unwrap_or_else(|| qemu().into());
    let assert_whole = |guest: &mut TestGuest, way: &str| {
        guest.console = Console::connect(&guest.folder.join("console")).expect("console");
        guest.console.ask("verify").unwrap_or_else(|error| panic!("{what}, {way}: {error}"));
        assert_eq!(own(lab), had, "{what}, {way}");
    };
    for program in [other, qemu().into()] {
        lab.dewar(&["upgrade", "g", "--yes", "--qemu", &program.display().to_string()]).done();
        assert_whole(guest, &format!("upgraded to {}", program.display()));
    }
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).done();
    assert_whole(guest, "thawed");
    lab.dewar(&["checkpoint", "g"]).done();
    lab.crash("g");
    lab.restore(guest, &["g"]).expect("restore");
    assert_whole(guest, "restored");
    lab.wait_for_memory("g");
}

fn empty_disk(path: &Path) {
    let mut made = Command::new("qemu-img");
    made.args(["create", "-q", "-f", "raw"]).arg(path).arg("32M");
    assert!(made.status().expect("qemu-img").success());
}

#[test]
#[ignore = "long: make test-long"]
fn what_qemu_makes_by_itself_stays() {
    for machine in ["pc-q35-7.2", "pc-i440fx-7.2"] {
        let lab = common::lab();
        let first = lab.path().join("first.img");
        empty_disk(&first);
        // Not where QEMU would put its own drive.
        let drive = format!("format=raw,index=0,file={}", first.display());
        let line = ["-machine", machine, "-device", "virtio-scsi-pci,id=scsi", "-drive", &drive];
        let mut guest = run(&lab, &line);
        let had = own(&lab);
        for kind in ["VGA", "ide-cd", "e1000"] {
            assert!(had.iter().any(|it| it.contains(kind)), "{machine}: {had:?}");
        }
        assert_kept(&lab, &mut guest, machine, &had);
        // Had it been there from the beginning there would be no drive for CD-ROMs.
        let disk = lab.path().join("late.img");
        empty_disk(&disk);
        let file = json!({"driver": "file", "filename": disk});
        ask(&lab, "blockdev-add", json!({"driver": "raw", "node-name": "late", "file": file}));
        let device =
            json!({"driver": "scsi-hd", "id": "late-disk", "drive": "late", "bus": "scsi.0"});
        ask(&lab, "device_add", device);
        assert_kept(&lab, &mut guest, &format!("{machine} and a disk"), &had);
    }
}

#[test]
#[ignore = "long: make test-long"]
fn another_display_stays() {
    let lab = common::lab();
    let mut guest = run(&lab, &["-machine", "pc-q35-7.2", "-vga", "cirrus", "-nic", "none"]);
    let had = own(&lab);
    assert!(had.contains(&"child<cirrus-vga>".to_owned()), "{had:?}");
    assert_kept(&lab, &mut guest, "cirrus", &had);
}

#[test]
#[ignore = "long: make test-long"]
fn what_qemu_would_make_for_what_was_unplugged_does_not_come() {
    let lab = common::lab();
    let disk = lab.path().join("first.img");
    empty_disk(&disk);
    let line = [
        "-machine",
        "pc-q35-7.2",
        "-device",
        "pcie-root-port,id=rp1,chassis=1",
        "-netdev",
        "user,id=n0",
        "-device",
        "virtio-net-pci,netdev=n0,id=nic0,bus=rp1",
        "-device",
        "virtio-scsi-pci,id=scsi",
        "-drive",
        &format!("if=none,id=d0,format=raw,file={}", disk.display()),
        "-device",
        "scsi-hd,drive=d0,id=disk0,bus=scsi.0",
    ];
    let mut guest = run(&lab, &line);
    let had = own(&lab);
    assert!(!had.iter().any(|it| it.contains("e1000") || it.contains("ide-cd")), "{had:?}");
    for id in ["nic0", "disk0"] {
        unplug(&mut Qmp::connect(&user_socket(&lab)).expect("QMP"), id);
    }
    ask(&lab, "netdev_del", json!({"id": "n0"}));
    wait_until("its drive goes with the disk", Duration::from_secs(10), || {
        let blocks = ask(&lab, "query-block", json!({}));
        !blocks.as_array().expect("list").iter().any(|it| it["device"] == "d0")
    });
    assert_kept(&lab, &mut guest, "unplugged", &had);
}

#[test]
#[ignore = "long: make test-long"]
fn a_medium_that_would_not_be_there_again_is_refused() {
    let lab = common::lab();
    let mut guest = run(&lab, &["-machine", "pc-q35-7.2"]);
    let disc = lab.path().join("disc.iso");
    empty_disk(&disc);
    let insert = json!({"device": "ide2-cd0", "filename": disc});
    ask(&lab, "blockdev-change-medium", insert);
    for line in [&["checkpoint", "g"][..], &["freeze", "g"], &["upgrade", "g", "--yes"]] {
        lab.dewar(line).failed(4, &["ide2-cd0", "disc.iso", "not touched"]);
    }
    ask(&lab, "eject", json!({"device": "ide2-cd0", "force": true}));
    let had = own(&lab);
    assert_kept(&lab, &mut guest, "ejected", &had);
}

/// What the drives hold, by QEMU's names for them.
fn media(lab: &Lab) -> Vec<(String, Option<String>)> {
    let blocks = ask(lab, "query-block", json!({}));
    let all = blocks.as_array().expect("list").iter().filter(|it| it["removable"] == true);
    let file = |block: &Value| block["inserted"]["file"].as_str().map(str::to_owned);
    all.map(|it| (it["device"].as_str().expect("name").to_owned(), file(it))).collect()
}

#[test]
#[ignore = "long: make test-long"]
fn what_was_ejected_does_not_come_back_and_what_was_changed_is_refused() {
    let lab = common::lab();
    let discs = ["one.iso", "two.iso"].map(|name| lab.path().join(name).display().to_string());
    discs.iter().for_each(|disc| empty_disk(Path::new(disc)));
    let named = format!("id=cd,if=none,media=cdrom,readonly=on,format=raw,file={}", discs[1]);
    let line = ["-machine", "pc-i440fx-7.2", "-cdrom", &discs[0], "-drive", &named];
    let line = [&line[..], &["-device", "ide-cd,drive=cd,bus=ide.0,unit=1"]].concat();
    let mut guest = run(&lab, &line);
    // The second's disc in the first drive: each is on the command line.
    let change = json!({"device": "ide1-cd0", "filename": discs[1]});
    ask(&lab, "blockdev-change-medium", change);
    for line in [&["checkpoint", "g"][..], &["freeze", "g"], &["upgrade", "g", "--yes"]] {
        lab.dewar(line).failed(4, &["two.iso now, not what QEMU began with", "not touched"]);
    }
    for drive in ["ide1-cd0", "cd"] {
        ask(&lab, "eject", json!({"device": drive, "force": true}));
    }
    let (had, empty) = (own(&lab), media(&lab));
    assert!(empty.iter().filter(|it| it.0.contains("cd")).all(|it| it.1.is_none()), "{empty:?}");
    assert_kept(&lab, &mut guest, "ejected", &had);
    assert_eq!(media(&lab), empty);
}

#[test]
#[ignore = "long: make test-long"]
fn disks_that_would_be_others_are_refused() {
    let lab = common::lab();
    let [base, top, other] = ["base.q", "top.q", "other.img"].map(|name| lab.path().join(name));
    let qemu_img = |words: &[&str]| {
        assert!(Command::new("qemu-img").args(words).status().expect("qemu-img").success());
    };
    let [b, t] = [&base, &top].map(|path| path.display().to_string());
    qemu_img(&["create", "-q", "-f", "qcow2", &b, "32M"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", &b, "-F", "qcow2", &t]);
    empty_disk(&other);
    let file = |name: &str, path: &str| format!("driver=file,node-name={name},filename={path}");
    let line = [
        "-machine",
        "pc-q35-7.2",
        "-blockdev",
        &format!("{},auto-read-only=on", file("bs", &b)),
        "-blockdev",
        r#"{"driver":"qcow2","node-name":"b","file":"bs","read-only":true,"backing":null}"#,
        "-blockdev",
        &file("ts", &t),
        "-blockdev",
        r#"{"driver":"qcow2","node-name":"f","file":"ts","backing":"b"}"#,
        "-device",
        "virtio-blk-pci,drive=f",
        "-drive",
        &format!("if=none,id=d0,format=raw,file={}", other.display()),
        "-device",
        "virtio-blk-pci,drive=d0,id=disk0",
    ];
    let mut guest = run(&lab, &line);
    let all = [&["checkpoint", "g"][..], &["freeze", "g"], &["upgrade", "g", "--yes"]];
    // Another file by the name of one that QEMU has open.
    let kept = lab.path().join("kept.img");
    std::fs::rename(&other, &kept).expect("rename");
    empty_disk(&other);
    for line in &all[1..] {
        lab.dewar(line).failed(4, &["other.img is not the file any more", "not touched"]);
    }
    std::fs::rename(&kept, &other).expect("rename");
    // The lower layer takes the place of the upper one.
    ask(&lab, "block-commit", json!({"device": "f", "job-id": "j"}));
    wait_until("the job is ready", Duration::from_secs(20), || {
        ask(&lab, "query-jobs", json!({}))[0]["status"] == "ready"
    });
    ask(&lab, "job-complete", json!({"id": "j"}));
    wait_until("its end", Duration::from_secs(20), || {
        ask(&lab, "query-jobs", json!({})).as_array().is_some_and(Vec::is_empty)
    });
    for line in all {
        lab.dewar(line).failed(4, &["not touched"]);
    }
    guest.console.ask("verify").expect("it runs on");
    lab.dewar(&["stop", "g", "--now"]).done();
    // A disk that was taken from under its device.
    let line = [&line[..2], &line[12..]].concat();
    let _guest = run(&lab, &line);
    let taken = json!({"command-line": "drive_del d0"});
    ask(&lab, "human-monitor-command", taken);
    for line in all {
        lab.dewar(line).failed(4, &["disk 'd0' was taken from a device", "not touched"]);
    }
}
