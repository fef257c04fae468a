//! Full disks, stores that vanish or are damaged, guests that cannot be taken:
//! a clear error, the right exit code, nothing lost.

use crate::common::{self, files};
use crate::upgrade_devices::unplug;
use dewar_guest_qemu::Qmp;
use dewar_testkit::{
    GuestSpec, Ran, SmallDisk, kill, qemu, sample, signal_stop, wait_until, wait_while_alive,
};
use rustix::process::Signal;
use serde_json::json;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

#[test]
#[ignore = "long: make test-long"]
fn stores_that_fail_leave_the_guest_running() {
    let lab = common::lab();
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    guest.console.ask("fill 64 noise").expect("fill");
    guest.console.ask("check 8000 1 disk").expect("check");

    let small = SmallDisk::mount(&lab.path().join("small"), "24m").expect("small disk");
    let url = format!("file:{}/store", small.path().display());
    let full = lab.dewar(&["checkpoint", "g", "--store", &url]);
    let left = files(small.path());
    let state = lab.ps("g").expect("listed")["state"].clone();
    drop(small);
    full.failed(1, &["No space left", "no checkpoint was made", "the guest is running"]);
    assert_eq!(state, "running");
    assert!(!left.iter().any(|path| path.to_string_lossy().contains(".seg")), "{left:?}");
    guest.console.ask("verify").expect("consistent");

    let fixed = SmallDisk::mount(&lab.path().join("fixed"), "200m").expect("small disk");
    let url = format!("file:{}/store", fixed.path().display());
    lab.dewar(&["checkpoint", "g", "--store", &url]).done();
    let remount = |how: &str| {
        let options = format!("remount,{how}");
        let done = Command::new("mount").args(["-o", &options]).arg(fixed.path()).status();
        assert!(done.expect("mount").success());
    };
    remount("ro");
    lab.dewar(&["checkpoint", "g", "--store", &url])
        .failed(1, &["Read-only file system", "the guest"]);
    lab.dewar(&["verify", "g", "--store", &url]).done();
    remount("rw");
    guest.console.ask("verify").expect("consistent");
    drop(fixed);

    // No folder can be made there.
    std::fs::write(lab.path().join("file"), "").expect("file");
    let url = format!("file:{}/file/store", lab.path().display());
    lab.dewar(&["checkpoint", "g", "--store", &url])
        .failed(1, &["Not a directory", "was not touched"]);
    lab.dewar(&["checkpoint", "g", "--store", "s3://bucket"]).failed(4, &["not of a kind"]);

    // The store is removed while a checkpoint is written to it.
    for step in ["armed", "resumed", "disks-current"] {
        let held = common::HeldCheckpoint::at(&lab, "g", step);
        std::fs::remove_dir_all(lab.store()).expect("remove");
        let (code, _, said) = held.go_on();
        assert_eq!(code, 1, "{said}");
        assert!(said.contains("No such file") && said.contains("is running"), "{said}");
        guest.console.ask("verify").expect("consistent");
    }
    lab.dewar(&["checkpoint", "g", "--tag", "last"]).done();
    lab.crash("g");
    lab.restore(&mut guest, &["last"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}

/// From the pause on the guest's writes need room beside its disk.
#[test]
fn a_guest_whose_disk_has_no_room_meanwhile_is_not_left_standing() {
    for (format, code) in [("raw", 0), ("qcow2", 5)] {
        let lab = common::lab();
        let folder = lab.guest_folder("g").expect("folder");
        let small = SmallDisk::mount(&folder, "80m").expect("small disk");
        if format == "raw" {
            // All of its room is taken: nothing that goes there needs more.
            std::fs::write(folder.join("disk0.raw"), vec![0; 64 << 20]).expect("disk");
        }
        let socket = lab.path().join("user-qmp");
        let mut spec = GuestSpec::default();
        spec.disks[0].format = format;
        spec.extra = vec!["-qmp".into(), format!("unix:{},server=on,wait=off", socket.display())];
        let mut guest = lab.run("g", &spec).expect("guest");
        let held = common::HeldCheckpoint::at(&lab, "g", "resumed");
        // Its first writes go to the overlay; what a qcow2 lacks it must have later.
        guest.console.ask("check 500 4 disk hard").expect("check");
        let overlay = folder.join(format!("disk0.{format}.dewar-overlay"));
        wait_until("writes", Duration::from_secs(20), || {
            std::fs::metadata(&overlay).is_ok_and(|data| data.len() > 512 << 10)
        });
        small.fill().expect("fill");
        let mut qmp = dewar_guest_qemu::Qmp::connect(&socket).expect("QMP");
        wait_until("a full disk", Duration::from_secs(20), || {
            qmp.execute("query-status", json!({})).expect("QMP")["status"] == "io-error"
        });
        let (ended, _, said) = held.go_on();
        assert_eq!(ended, code, "{format}: {said}");
        if code != 0 {
            // What the guest wrote has no room in its own file either.
            assert!(said.contains("needs attention"), "{said}");
            assert!(!said.contains("is running"), "{said}");
            small.free().expect("free");
        }
        // The guardian is at it, or this command is.
        wait_until("the guest", Duration::from_secs(20), || {
            lab.dewar(&["ps"]).done();
            qmp.execute("query-status", json!({})).expect("QMP")["status"] == "running"
        });
        guest.console.ask("verify").unwrap_or_else(|error| panic!("{format}: {error:#}"));
        if code == 0 {
            small.free().expect("free");
        }
        lab.dewar(&["checkpoint", "g"]).done();
        lab.crash("g");
    }
}

#[test]
fn a_failure_in_the_pause_lets_the_guest_run_at_once() {
    let lab = common::lab();
    let socket = lab.path().join("user-qmp");
    let user = format!("unix:{},server=on,wait=off", socket.display());
    let extra = ["-qmp", user.as_str(), "-device", "qemu-xhci"].map(str::to_owned).to_vec();
    let spec = GuestSpec { extra, ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("check 8000 1 disk").expect("check");
    let held = common::HeldCheckpoint::at(&lab, "g", "stopped");
    // From now on QEMU cannot save the device state.
    let mut qmp = dewar_guest_qemu::Qmp::connect(&socket).expect("QMP");
    let device = json!({"driver": "usb-mtp", "id": "mtp", "rootdir": "/var/empty"});
    std::fs::create_dir_all("/var/empty").expect("folder");
    qmp.execute("device_add", device).expect("a device that cannot migrate");
    let (code, _, said) = held.go_on();
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("saving the device state") && said.contains("is running"), "{said}");
    guest.console.ask("verify").expect("consistent");
    assert!(!lab.root().join("guests/g/journal.json").exists());
    // Now it is known beforehand, and the guest is not touched.
    lab.dewar(&["checkpoint", "g"]).failed(4, &["usb-mtp"]);
    unplug(&mut qmp, "mtp");
    lab.dewar(&["checkpoint", "g"]).done();
}

#[test]
#[ignore = "long: make test-long"]
fn a_checkpoint_that_a_lazy_guest_needs_is_kept() {
    let lab = common::lab();
    let spec = GuestSpec { memory_mib: 512, disks: Vec::new(), ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("fill 350 noise").expect("fill");
    lab.dewar(&["checkpoint", "g", "--tag", "t"]).done();
    lab.crash("g");
    let mut restore = lab
        .command(&["restore", "t"])
        .env("DEWAR_TEST_SIGNAL", "loaded:stop")
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("dewar");
    let restoring = restore.id() as i32;
    wait_until("the loaded guest", Duration::from_secs(20), || signal_stop(restoring));
    // Its server dies; nobody holds the image open any more.
    let server = lab.pid_on_record("g", "server");
    kill(server, Signal::KILL);
    wait_while_alive(server);
    lab.dewar(&["delete", "t"]).failed(1, &["guest 'g'", "nothing was removed"]);
    kill(restoring, Signal::CONT);
    restore.wait().expect("restore");
    lab.dewar(&["restore", "g"]).done();
    lab.wait_for_memory("g");
    lab.dewar(&["delete", "t"]).done();
}

#[test]
fn a_guest_without_a_page_server_is_not_started() {
    let lab = common::lab();
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    guest.console.ask("check 3000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "g", "--tag", "t"]).done();
    lab.crash("g");
    let mut restore = lab
        .command(&["restore", "t"])
        .env("DEWAR_TEST_SIGNAL", "loaded:stop")
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("dewar");
    let restoring = restore.id() as i32;
    wait_until("the loaded guest", Duration::from_secs(20), || signal_stop(restoring));
    let server = lab.pid_on_record("g", "server");
    let arrived = || lab.ps("g").expect("listed")["lazy_restore"]["complete"] == true;
    kill(server, Signal::KILL);
    wait_while_alive(server);
    kill(restoring, Signal::KILL);
    restore.wait().expect("restore");
    if arrived() {
        println!("SKIPPED a_guest_without_a_page_server_is_not_started: its memory came too soon");
        return;
    }
    // Started now, QEMU might wait for a page for ever, and answer nobody.
    assert_eq!(lab.ps("g").expect("listed")["state"], "paused");
    lab.dewar(&["restore", "g"]).done();
    assert_eq!(lab.ps("g").expect("listed")["state"], "running");
    guest.console =
        dewar_testkit::Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
}

#[test]
#[ignore = "long: make test-long"]
fn a_small_buffer_keeps_the_guest_right() {
    let lab = common::lab();
    let spec = GuestSpec { vcpus: 2, ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("check 12000 2 disk hard").expect("check");
    let mut people = std::process::Command::new(env!("CARGO_BIN_EXE_dewar"));
    people.arg("--root").arg(lab.root()).args(["checkpoint", "g", "--buffer", "1M"]);
    let output = people.args(["--max-pause", "1ms"]).output().expect("dewar");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("longer than --max-pause 1.0 ms"), "{said}");
    assert!(said.contains("found no room: a larger --buffer may help"), "{said}");
    let told = lab.dewar(&["checkpoint", "g", "--full", "--buffer", "1M"]).done().json();
    assert!(told["captured"]["overflowed"].as_u64() > Some(0), "{told}");
    assert_eq!(told["max_pause_ms"], 25.0);
    lab.crash("g");
    lab.restore(&mut guest, &["g"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}

/// What a message names where a file is damaged.
fn place(path: &Path) -> &str {
    match path.parent().and_then(Path::file_name).and_then(|folder| folder.to_str()) {
        Some("segments") => "segment",
        Some("images") => "record",
        _ => path.file_name().and_then(|name| name.to_str()).expect("a name"),
    }
}

#[test]
fn damage_anywhere_never_reaches_a_guest() {
    let lab = common::lab();
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "g", "--tag", "t"]).done();
    lab.crash("g");
    let (mut seen, mut superseded) = (0, 0);
    let mut objects = files(&lab.store());
    objects.retain(|path| !path.ends_with("next-segment") && !path.ends_with("store.json"));
    for path in sample("damaged objects", objects, 5) {
        let name = path.display().to_string();
        let good = std::fs::read(&path).expect("read");
        // Header, body, end.
        let all = [3, 40, 100, good.len() / 3, good.len() / 2, good.len() - 20, good.len() - 2];
        for at in sample("damaged bytes of an object", all.to_vec(), 4) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            std::fs::write(&path, bad).expect("write");
            let verified = lab.dewar(&["verify", "t"]);
            assert!(verified.stderr.contains(place(&path)), "{name}: {}", verified.stderr);
            verified.code_is_a_refusal(&format!("verify, byte {at} of {name}"));
            let restored = lab.dewar(&["restore", "t", "--eager"]);
            if restored.code == 0 {
                // Only where no page of the guest lies in the damaged frame: a
                // newer copy of its pages was captured later.
                superseded += 1;
                let port = guest.folder.join("console");
                guest.console = dewar_testkit::Console::connect(&port).expect("console");
                guest.console.ask("verify").expect("every page is its own");
                lab.crash("g");
            } else {
                restored.code_is_a_refusal(&format!("restore, byte {at} of {name}"));
                assert_eq!(lab.pid("g"), None, "no guest runs on damage");
            }
            seen += 1;
        }
        std::fs::write(&path, good).expect("write");
    }
    println!("{seen} places, {superseded} in frames that were superseded");
    assert!(seen > 15 && superseded < seen / 4);
    lab.restore(&mut guest, &["t"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}

#[test]
#[ignore = "long: make test-long"]
fn a_checkpoint_that_cannot_be_read_is_not_passed_over() {
    let lab = common::lab();
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    guest.console.ask("check 500 1 disk").expect("check");
    let checkpoint = || {
        let told = lab.dewar(&["checkpoint", "g"]).done().json();
        told["checkpoint"].as_str().expect("id").to_owned()
    };
    let (older, newest) = (checkpoint(), checkpoint());
    lab.crash("g");
    let record = lab.store().join(format!("images/{newest}.json"));
    let mut bytes = std::fs::read(&record).expect("read");
    bytes[200] ^= 1;
    std::fs::write(&record, bytes).expect("write");

    lab.dewar(&["restore", "g"]).failed(1, &["cannot be read", &newest, &older]);
    assert_eq!(lab.pid("g"), None, "it is not put back to an older state");
    lab.dewar(&["delete", "g"]).failed(1, &["cannot be read", &newest]);
    lab.dewar(&["gc"]).failed(1, &[&format!("dewar delete {newest}")]);
    assert_eq!(lab.dewar(&["delete", &newest]).done().json()["left_to_gc"], true);
    let freed = lab.dewar(&["gc"]).done().json();
    assert!(freed["disks_removed"].as_u64() > Some(0), "{freed}");
    lab.restore(&mut guest, &["g"]).expect("restore");
    guest.console.ask("verify").expect("consistent");

    // Removed by hand under a guest whose disk stands on it.
    std::fs::remove_file(lab.store().join(format!("images/{older}.json"))).expect("remove");
    let before = files(&lab.store());
    lab.dewar(&["gc"]).failed(1, &["'g' stands on disks", &older, "dewar rm g"]);
    assert_eq!(files(&lab.store()), before);
}

#[test]
fn what_cannot_be_run_is_refused_before_it_starts() {
    let lab = common::lab();
    let qemu = qemu();
    let run = |line: &[&str]| {
        let all =
            [&["run", "refused", "--", qemu.as_str(), "-display", "none", "-nodefaults"], line]
                .concat();
        lab.dewar(&all)
    };
    run(&["-m", "64M", "-device", "vfio-pci,host=00:00.0"]).failed(4, &["VFIO"]);
    run(&["-m", "900G"]).failed(4, &["no room", "900 GiB"]);
    // A tmpfs may promise more than there is memory.
    let vast = SmallDisk::mount(&lab.path().join("vast"), "1000g").expect("tmpfs");
    let folder = vast.path().display().to_string();
    lab.dewar(&["run", "refused", "--ram-dir", &folder, "--", &qemu, "-m", "900G"])
        .failed(4, &["no room", "900 GiB"]);
    run(&["-m", "64M", "-device", "no-such-device"])
        .failed(1, &["did not start", "no-such-device"]);
    lab.dewar(&["run", "refused", "--", "no-such-qemu"]).failed(1, &["no-such-qemu"]);
    lab.dewar(&["run", "../refused", "--", &qemu]).failed(2, &["no name for a guest"]);
    lab.dewar(&["run", "refused"]).failed(2, &[]);
    lab.dewar(&["run", "refused", "--", "-m", "1G"]).failed(2, &["no program", "qemu-system"]);
    for tag in ["", "two\nlines", &"x".repeat(101)] {
        lab.dewar(&["checkpoint", "g", "--tag", tag]).failed(2, &["tag"]);
    }
    lab.dewar(&["checkpoint", "g"]).failed(3, &["no guest 'g'"]);
    lab.dewar(&["restore", "g"]).failed(3, &["no checkpoint"]);
    // A migration blocker: this device's state cannot be saved.
    run(&["-m", "64M", "-device", "pci-bridge,chassis_nr=1", "-only-migratable"]).done();
    lab.dewar(&["rm", "refused", "--force"]).done();
    let drive = format!("if=none,id=v,format=raw,file=fat:rw:{}", lab.path().display());
    run(&["-m", "64M", "-drive", &drive]).failed(4, &["QEMU cannot save its state", "vvfat"]);
    // A file that many guests may begin with.
    let template = lab.path().join("template");
    std::fs::write(&template, vec![7; 64 << 20]).expect("template");
    let object =
        format!("memory-backend-file,id=m,size=64M,mem-path={},share=off", template.display());
    run(&["-object", &object, "-machine", "memory-backend=m", "-m", "64M"])
        .failed(4, &["private", "share=on"]);
    assert!(std::fs::read(&template).expect("template").iter().all(|byte| *byte == 7));
    let left = lab.ram_files("refused");
    assert!(left.is_empty(), "no RAM file is left: {left:?}");
    assert_eq!(lab.dewar(&["ps"]).json()["guests"], serde_json::json!([]));
}

#[test]
fn memory_that_is_plugged_in_is_refused_before_the_guest_is_touched() {
    let lab = common::lab();
    let socket = lab.path().join("user-qmp");
    let user = format!("unix:{},server=on,wait=off", socket.display());
    let line = ["-display", "none", "-nodefaults", "-m", "64M,slots=1,maxmem=1G", "-qmp", &user];
    lab.dewar(&[&["run", "g", "--", qemu().as_str()], &line[..]].concat()).done();
    let mut user = Qmp::connect(&socket).expect("QMP");
    let mut ask = |command, arguments| user.execute(command, arguments).expect(command);
    let backend = json!({"qom-type": "memory-backend-ram", "id": "more", "size": 128 << 20});
    ask("object-add", backend);
    ask("device_add", json!({"driver": "pc-dimm", "id": "dimm", "memdev": "more"}));
    for words in [&["checkpoint", "g"][..], &["freeze", "g"], &["upgrade", "g", "--yes"]] {
        lab.dewar(words).failed(4, &["it has memory devices"]);
        assert_eq!(ask("query-status", json!({}))["status"], "running", "{words:?}");
    }
    lab.dewar(&["rm", "g", "--force"]).done();
}

#[test]
fn who_lacks_the_rights_is_told_so() {
    let lab = common::lab();
    lab.run("g", &GuestSpec::default()).expect("guest");
    // The repository may lie where others cannot look.
    let dewar = lab.path().join("dewar");
    common::copy_program(Path::new(env!("CARGO_BIN_EXE_dewar")), &dewar);
    std::fs::set_permissions(lab.path(), Permissions::from_mode(0o777)).expect("chmod");
    let nobody = |root: &Path, line: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
        command.args(["--inh-caps=-all".as_ref(), dewar.as_os_str(), "--json".as_ref()]);
        command.arg("--root").arg(root).args(line).current_dir("/");
        Ran::of(&command.output().expect("setpriv"))
    };
    for line in [&["ps"][..], &["ls"], &["checkpoint", "g"], &["stop", "g"], &["gc"]] {
        nobody(&lab.root(), line).failed(1, &["Permission denied"]);
    }
    let own = lab.path().join("own");
    let everybody = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if everybody.is_ok_and(|may| may.trim() == "0") {
        nobody(&own, &["run", "n", "--", &qemu(), "-m", "64M"]).failed(4, &["userfaultfd"]);
    }
    assert_eq!(nobody(&own, &["ps"]).done().json()["guests"], json!([]));
    lab.dewar(&["checkpoint", "g"]).done();
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_cannot_be_told_of_is_named() {
    let lab = common::lab();
    lab.run("g", &GuestSpec::default()).expect("guest");
    lab.run("h", &GuestSpec::default()).expect("guest");
    let record = lab.root().join("guests/g/guest.json");
    let good = std::fs::read(&record).expect("read");
    std::fs::write(&record, "{").expect("write");
    lab.dewar(&["ps"]).failed(1, &["guests/g/guest.json"]);
    lab.dewar(&["checkpoint", "h"]).done();
    lab.dewar(&["gc"]).failed(1, &["guests/g/guest.json"]);
    lab.dewar(&["delete", "h"]).failed(1, &["guests/g/guest.json"]);
    std::fs::write(&record, good).expect("write");
    lab.dewar(&["ps"]).done();
    lab.dewar(&["delete", "h"]).done();
}
