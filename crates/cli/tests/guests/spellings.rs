//! Disks in every spelling that QEMU takes, behind filters, and with snapshots that their
//! user put on top: one thing with one content, whatever it is called.

use crate::common;
use dewar_guest_qemu::Qmp;
use dewar_testkit::{Console, GuestSpec, Lab, TestGuest, wait_until};
use serde_json::json;
use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

fn make_disk(folder: &Path, name: &str) -> String {
    let path = folder.join(name).display().to_string();
    let made =
        Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &path, "64M"]).status();
    assert!(made.expect("qemu-img").success());
    path
}

fn start(lab: &Lab, extra: Vec<String>) -> TestGuest {
    lab.run("g", &GuestSpec { disks: Vec::new(), extra, ..GuestSpec::default() }).expect("guest")
}

/// A checkpoint while it writes, the way back, another QEMU, and both ways of a freeze.
fn there_and_back(lab: &Lab, guest: &mut TestGuest, disks: u64) {
    let reach = |guest: &mut TestGuest, after: &str| {
        guest.console = Console::connect(&guest.folder.join("console")).expect("console");
        guest.console.ask("verify").unwrap_or_else(|error| panic!("{after}: {error}"));
    };
    for round in ["first", "second"] {
        let told = lab.dewar(&["checkpoint", "g", "--tag", round]).done().json();
        assert_eq!(told["disks"], disks, "{round}");
        guest.console.ask("verify").expect("it goes on");
    }
    lab.dewar(&["upgrade", "g"]).done();
    reach(guest, "upgrade");
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).done();
    reach(guest, "thaw");
    lab.dewar(&["stop", "g", "--now"]).done();
    for round in ["first", "second"] {
        lab.dewar(&["restore", round, "--replace"]).done();
        reach(guest, round);
    }
    lab.dewar(&["checkpoint", "g"]).done();
}

#[test]
#[ignore = "long: make test-long"]
fn disks_are_found_however_they_are_written() {
    let lab = common::lab();
    let folder = lab.guest_folder("g").expect("folder");
    let at = |name: &str| make_disk(&folder, name);
    make_disk(lab.path(), "with:a:colon");
    let throttled = format!(
        r#"{{"driver":"throttle","node-name":"top","throttle-group":"tg0","file":{{"driver":"qcow2",
            "node-name":"format","file":{{"driver":"file","filename":"{}","node-name":"file"}}}}}}"#,
        at("a")
    );
    let line = [
        "-object".to_owned(),
        "throttle-group,id=tg0,x-iops-total=100000".to_owned(),
        "-blockdev".to_owned(),
        throttled,
        "-device".to_owned(),
        "virtio-blk-pci,drive=top,addr=10".to_owned(),
        "-drive".to_owned(),
        format!("file.driver=file,file.filename={},driver=qcow2,if=virtio", at("b")),
        "-drive".to_owned(),
        format!(
            r#"file=json:{{"driver":"qcow2",,"file":{{"driver":"file",,"filename":"{}"}}}},if=virtio"#,
            at("c")
        ),
        "-drive".to_owned(),
        "file=file:with:a:colon,if=virtio,format=qcow2".to_owned(),
    ];
    let mut guest = start(&lab, line.to_vec());
    guest.console.ask("check 4000 1 disk").expect("check");
    there_and_back(&lab, &mut guest, 4);
}

/// As 'virsh snapshot-create --disk-only' does it, of a drive and of a block node.
#[test]
#[ignore = "long: make test-long"]
fn a_snapshot_on_top_of_a_disk_is_followed() {
    let lab = common::lab();
    let folder = lab.guest_folder("g").expect("folder");
    let socket = folder.join("user.qmp");
    let (one, two) = (make_disk(&folder, "a"), make_disk(&folder, "b"));
    let line = [
        "-drive".to_owned(),
        format!("file={one},if=virtio,format=qcow2,id=d0"),
        "-blockdev".to_owned(),
        format!("driver=file,filename={two},node-name=prot"),
        "-blockdev".to_owned(),
        "driver=qcow2,file=prot,node-name=fmt".to_owned(),
        "-device".to_owned(),
        "virtio-blk-pci,drive=fmt".to_owned(),
        "-qmp".to_owned(),
        format!("unix:{},server=on,wait=off", socket.display()),
    ];
    let mut guest = start(&lab, line.to_vec());
    guest.console.ask("check 4000 1 disk").expect("check");
    let mut qmp = Qmp::connect(&socket).expect("the user's QMP");
    for (key, name, more) in
        [("device", "d0", json!({})), ("node-name", "fmt", json!({"snapshot-node-name": "s"}))]
    {
        let mut arguments = json!({
            key: name, "format": "qcow2",
            "snapshot-file": folder.join(format!("{name}.snapshot")),
        });
        more.as_object().expect("object").iter().for_each(|(k, v)| arguments[k] = v.clone());
        qmp.execute("blockdev-snapshot-sync", arguments).expect("snapshot");
    }
    drop(qmp);
    guest.console.ask("verify").expect("it goes on");
    there_and_back(&lab, &mut guest, 2);
}

/// What is made for a QEMU that becomes another user can be opened by that user.
#[test]
#[ignore = "long: make test-long"]
fn a_qemu_that_becomes_another_user_finds_what_is_made_for_it() {
    let lab = common::lab();
    let folder = lab.guest_folder("g").expect("folder");
    let disk = make_disk(&folder, "a");
    let line = || {
        let drive = format!("file={disk},if=virtio,format=qcow2");
        ["-runas".to_owned(), "nobody".to_owned(), "-drive".to_owned(), drive].to_vec()
    };
    let open = |extra: Vec<String>| {
        let spec = GuestSpec { disks: Vec::new(), extra, ..GuestSpec::default() };
        let line = spec.command(&folder).expect("line");
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        lab.dewar(&[&["run", "g", "--"][..], &line].concat())
    };
    // The lab's folder is its owner's alone; then the disk is.
    let chmod = |mode: &str| {
        let done = Command::new("chmod").arg(mode).arg(lab.path()).status();
        assert!(done.expect("chmod").success());
    };
    chmod("0700");
    open(line()).failed(4, &["may not enter", "chmod o+x"]);
    chmod("o+x");
    open(line()).failed(4, &["cannot be opened again by user"]);
    chown(&disk, Some(65534), None).expect("chown");
    let mut guest = start(&lab, line());
    guest.console.ask("check 4000 1 disk").expect("check");
    there_and_back(&lab, &mut guest, 1);
    lab.dewar(&["freeze", "g", "--to-store"]).done();
    lab.dewar(&["thaw", "g"]).done();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("whole");
}

#[test]
fn what_no_checkpoint_could_be_taken_of_is_told_at_run() {
    let lab = common::lab();
    let folder = lab.guest_folder("g").expect("folder");
    let spec = GuestSpec {
        extra: ["-chroot", &folder.display().to_string()].map(str::to_owned).to_vec(),
        boots: false,
        ..GuestSpec::default()
    };
    let line = spec.command(&folder).expect("line");
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    let told = lab.dewar(&[&["run", "g", "--"][..], &line].concat()).done();
    assert!(told.stderr.contains("no checkpoint of it can be taken"), "{told:?}");
    assert!(
        told.json()["no_checkpoint"].as_str().is_some_and(|it| it.contains("-chroot")),
        "{told:?}"
    );
    lab.dewar(&["checkpoint", "g"]).failed(4, &["-chroot"]);
}

/// Both QEMUs need the disk for a moment: a server for one client is found before they wait.
#[test]
fn a_disk_on_a_server_for_one_is_not_moved() {
    let lab = common::lab();
    let folder = lab.guest_folder("g").expect("folder");
    let disk = folder.join("n.raw");
    fs::File::create(&disk).and_then(|file| file.set_len(16 << 20)).expect("disk");
    let socket = folder.join("nbd");
    for (clients, works) in [("1", false), ("3", true)] {
        let mut server = Command::new("qemu-nbd")
            .args(["-f", "raw", "-t", "--shared", clients, "-k"])
            .args([&socket, &disk])
            .spawn()
            .expect("qemu-nbd");
        wait_until("the server", Duration::from_secs(10), || dewar_testkit::listens(&socket));
        let drive = format!("file=nbd+unix:///?socket={},format=raw,if=virtio", socket.display());
        let extra = ["-drive".to_owned(), drive].to_vec();
        let spec = GuestSpec { disks: Vec::new(), extra, boots: false, ..GuestSpec::default() };
        lab.run("g", &spec).expect("guest");
        let began = Instant::now();
        let moved = lab.dewar(&["upgrade", "g"]);
        if works {
            moved.done();
        } else {
            moved.failed(4, &["NBD server", "not touched"]);
            assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        }
        assert_eq!(lab.ps("g").expect("listed")["state"], "running");
        lab.dewar(&["rm", "g", "--force"]).done();
        server.kill().and_then(|()| server.wait()).expect("it ends");
        let _ = fs::remove_file(&socket);
    }
}

/// A disk that was left out is not in the store, and empty in the guest that comes back.
#[test]
#[ignore = "long: make test-long"]
fn a_disk_can_be_left_out() {
    let lab = common::lab();
    let disks = [(); 2].map(|()| dewar_testkit::DiskSpec::default()).to_vec();
    let mut guest = lab.run("g", &GuestSpec { disks, ..GuestSpec::default() }).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "g", "--exclude", "scratch"]).failed(3, &["scratch", "virtio1"]);
    let scratch = guest.folder.join("disk1.qcow2").display().to_string();
    for wanted in ["virtio1", &scratch] {
        let told = lab.dewar(&["checkpoint", "g", "--exclude", wanted]).done().json();
        assert_eq!((&told["disks"], &told["excluded"]), (&json!(1), &json!(["virtio1"])), "{told}");
    }
    let listed = lab.dewar(&["ls"]).done().json();
    assert_eq!(listed["checkpoints"][0]["excluded"], json!(["virtio1"]));
    let whole = lab.dewar(&["checkpoint", "g", "--tag", "whole"]).done().json();
    assert_eq!((&whole["disks"], &whole["excluded"]), (&json!(2), &json!([])));
    guest.console.ask("verify").expect("it goes on");
    let first = listed["checkpoints"][0]["checkpoint"].as_str().expect("id");
    for (reference, excluded) in [(first, json!(["virtio1"])), ("whole", json!([]))] {
        let told = lab.restore(&mut guest, &[reference, "--replace"]).expect("restore").json();
        assert_eq!(told["excluded"], excluded);
        guest.console.ask("verify").expect("whole");
        lab.wait_for_memory("g");
        lab.dewar(&["checkpoint", "g"]).done();
    }
}
