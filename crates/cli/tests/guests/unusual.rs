//! Guests whose command lines are less usual, there and back; and processes that are not
//! what they seem.

use crate::common::{self, HeldCheckpoint};
use dewar_guest_qemu::{Qmp, map_ram_files};
use dewar_memory::{Pid, ProcessHandle, UffdOrigin, WriteTracker};
use dewar_registry::GuestRecord;
use dewar_testkit::{Console, GuestSpec, Lab, SmallDisk, TestGuest, is_alive, kill, wait_until};
use dewar_testkit::{signal_stop, wait_while_alive};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::Signal;
use serde_json::json;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A guest with these options beside the usual ones, and no disk but theirs.
fn run(lab: &Lab, options: &[&str]) -> TestGuest {
    let extra = options.iter().map(|word| (*word).to_owned()).collect();
    let spec = GuestSpec { disks: Vec::new(), extra, ..GuestSpec::default() };
    lab.run("g", &spec).expect("guest")
}

fn qemu_img(words: &[&str]) {
    let ran = Command::new("qemu-img").args(words).stdout(Stdio::null()).status();
    assert!(ran.expect("qemu-img").success(), "qemu-img {words:?}");
}

fn save_and_bring_back(lab: &Lab, guest: &mut TestGuest) {
    lab.dewar(&["checkpoint", "g"]).done();
    lab.crash("g");
    lab.restore(guest, &["g"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}

#[test]
#[ignore = "long: make test-long"]
fn a_disk_that_says_what_is_below_it_comes_back_with_its_content() {
    let lab = common::lab();
    let folder = lab.guest_folder("g").expect("folder");
    let file = |name: &str| folder.join(name).display().to_string();
    let (base, top) = (file("base.qcow2"), file("top.qcow2"));
    qemu_img(&["create", "-f", "qcow2", &base, "64M"]);
    qemu_img(&["create", "-f", "qcow2", &top, "-b", &base, "-F", "qcow2"]);
    // As libvirt writes it: each layer by itself.
    let protocol = |name: &str, path: &str| {
        json!({"driver": "file", "filename": path, "node-name": name}).to_string()
    };
    let below = json!({"driver": "qcow2", "file": "bs", "node-name": "b", "backing": null,
        "read-only": true});
    let disk = json!({"driver": "qcow2", "file": "s", "node-name": "f", "backing": "b"});
    let mut bs: serde_json::Value = serde_json::from_str(&protocol("bs", &base)).expect("JSON");
    bs["read-only"] = true.into();
    let mut guest = run(
        &lab,
        &[
            "-blockdev",
            &bs.to_string(),
            "-blockdev",
            &below.to_string(),
            "-blockdev",
            &protocol("s", &top),
            "-blockdev",
            &disk.to_string(),
            "-device",
            "virtio-blk-pci,drive=f",
        ],
    );
    guest.console.ask("check 2000 1 disk").expect("check");
    save_and_bring_back(&lab, &mut guest);
    // And from there once more.
    save_and_bring_back(&lab, &mut guest);
}

/// A block device on a file.
struct Loop(String);

impl Loop {
    fn on(file: &Path) -> Option<Self> {
        let made = Command::new("losetup").args(["-f", "--show"]).arg(file).output().ok()?;
        let name = String::from_utf8_lossy(&made.stdout).trim().to_owned();
        made.status.success().then_some(Self(name))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

#[test]
#[ignore = "long: make test-long"]
fn a_disk_on_a_block_device_comes_back_as_a_file() {
    let lab = common::lab();
    let file = lab.path().join("device");
    fs::File::create(&file).and_then(|file| file.set_len(64 << 20)).expect("file");
    let Some(device) = Loop::on(&file) else {
        println!("SKIPPED a_disk_on_a_block_device_comes_back_as_a_file: no loop devices here");
        return;
    };
    let node = json!({"driver": "raw", "node-name": "f",
        "file": {"driver": "host_device", "filename": device.0}});
    let options = ["-blockdev", &node.to_string(), "-device", "virtio-blk-pci,drive=f"];
    let mut guest = run(&lab, &options);
    guest.console.ask("check 2000 1 disk").expect("check");
    save_and_bring_back(&lab, &mut guest);
}

#[test]
#[ignore = "long: make test-long"]
fn a_restored_guest_goes_on_in_its_log() {
    let lab = common::lab();
    let log = lab.path().join("log");
    let mut guest = run(&lab, &["-serial", &format!("file:{}", log.display())]);
    guest.console.ask("check 2000 1 none").expect("check");
    lab.dewar(&["checkpoint", "g"]).done();
    fs::write(&log, "what was logged before\n").expect("log");
    lab.crash("g");
    lab.restore(&mut guest, &["g"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    assert!(fs::read_to_string(&log).expect("log").starts_with("what was logged before\n"));
}

#[test]
fn descriptors_that_came_from_another_end_with_a_frozen_guest() {
    let lab = common::lab();
    // As a program does that hands over what it opened.
    let file = fs::File::open("/dev/null").expect("a file");
    fcntl_setfd(&file, FdFlags::empty()).expect("inherited");
    let mut guest = run(&lab, &["-add-fd", &format!("fd={},set=2", file.as_raw_fd())]);
    lab.dewar(&["freeze", "g"]).failed(4, &["-add-fd", "not touched"]);
    lab.dewar(&["upgrade", "g"]).failed(4, &["-add-fd", "not touched"]);
    // The user that restores a checkpoint may have them.
    guest.console.ask("check 2000 1 none").expect("check");
    save_and_bring_back(&lab, &mut guest);
}

#[test]
#[ignore = "long: make test-long"]
fn ram_files_are_found_from_any_folder() {
    let lab = common::lab();
    let line = GuestSpec::default().command(&lab.guest_folder("g").expect("folder"));
    let line = line.expect("command");
    let words: Vec<&str> = line.iter().map(String::as_str).collect();
    let there = |words: &[&str]| {
        let output = lab.command(words).current_dir("/dev/shm").output().expect("dewar");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let started = lab.dewar(&[&["run", "g", "--ram-dir", "/dev/shm", "--"], &words[..]].concat());
    started.done();
    let mut guest = lab.reach("g").expect("guest");
    guest.console.ask("check 2000 1 disk").expect("check");
    let own = lab.path().join("g/disk0.qcow2");
    assert!(own.exists());
    lab.dewar(&["checkpoint", "g"]).done();
    lab.crash("g");
    lab.dewar(&["rm", "g"]).done();
    assert_eq!(lab.ram_files("g"), Vec::<PathBuf>::new());
    for more in [&["--eager"][..], &[]] {
        there(&[&["restore", "g", "--ram-dir", "."], more].concat());
        guest.console = Console::connect(&guest.folder.join("console")).expect("console");
        guest.console.ask("verify").expect("consistent");
        lab.wait_for_memory("g");
        lab.crash("g");
    }
}

/// A QEMU that has given up root's rights may not make a userfaultfd by itself.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_without_rights_is_restored_lazily() {
    let lab = common::lab();
    // QEMU 10 knows the other way only.
    let help = Command::new("qemu-system-x86_64").arg("-help").output().expect("QEMU's help");
    let way = match String::from_utf8_lossy(&help.stdout).contains("-runas") {
        true => ["-runas", "nobody"],
        false => ["-run-with", "user=nobody"],
    };
    let mut guest = run(&lab, &way);
    guest.console.ask("check 2000 1 none").expect("check");
    lab.dewar(&["checkpoint", "g"]).done();
    lab.crash("g");
    let told = lab.restore(&mut guest, &["g"]).expect("restore").json();
    assert_eq!(told["lazy"], true);
    guest.console.ask("verify").expect("consistent");
    lab.wait_for_memory("g");
    lab.dewar(&["checkpoint", "g"]).done();
    guest.console.ask("verify").expect("consistent");
}

#[test]
fn a_sleeping_guest_is_left_where_it_is() {
    let lab = common::lab();
    let socket = lab.path().join("user-qmp");
    let mut guest = run(&lab, &["-qmp", &format!("unix:{},server=on,wait=off", socket.display())]);
    let _ = guest.console.ask("spawn sh -c echo${IFS}mem>/sys/power/state");
    let mut user = Qmp::connect(&socket).expect("QMP");
    let mut status = || user.execute("query-status", json!({})).expect("status")["status"].clone();
    wait_until("sleep", Duration::from_secs(20), || status() == "suspended");
    for verb in [&["checkpoint", "g"][..], &["freeze", "g"], &["upgrade", "g", "--yes"]] {
        lab.dewar(verb).failed(4, &["ACPI S3"]);
        assert_eq!(status(), "suspended", "{verb:?}");
    }
}

#[test]
#[ignore = "long: make test-long"]
fn a_silent_qemu_keeps_nobody_waiting_for_ever() {
    let lab = common::lab();
    run(&lab, &[]);
    let pid = lab.pid("g").expect("pid");
    kill(pid, Signal::STOP);
    wait_until("it stands still", Duration::from_secs(5), || signal_stop(pid));
    let ended = |words: &[&str]| {
        let mut dewar = lab.command(words).stdout(Stdio::null()).spawn().expect("dewar");
        wait_until(&format!("the end of {words:?}"), Duration::from_secs(60), || {
            dewar.try_wait().expect("wait").is_some()
        });
    };
    // Each leaves a connection that QEMU has not accepted.
    for _ in 0..3 {
        ended(&["ps"]);
    }
    ended(&["stop", "g", "--now"]);
    assert!(!is_alive(pid));
}

#[test]
fn a_terminal_stops_no_command_that_holds_a_guest() {
    let lab = common::lab();
    run(&lab, &[]);
    for (line, step) in [
        (&["checkpoint", "g"][..], "stopped"),
        (&["upgrade", "g", "--yes"], "started"),
        (&["freeze", "g"], "kept"),
    ] {
        let held = HeldCheckpoint::at_with(&lab, line, step);
        // A checkpoint is a child of itself.
        let pid = held.started(line[0]).unwrap_or(held.pid);
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("mask");
        let blocked = u64::from_str_radix(blocked.trim(), 16).expect("mask");
        assert_ne!(blocked & (1 << (Signal::TSTP.as_raw() - 1)), 0, "{line:?}");
        let (code, _, said) = held.go_on();
        assert_eq!(code, 0, "{line:?}: {said}");
    }
}

#[test]
fn what_a_dead_process_wrote_is_not_taken_for_nothing() {
    let lab = common::lab();
    run(&lab, &[]);
    let record: GuestRecord = serde_json::from_value(lab.record("g")).expect("record");
    let pid = record.process.pid;
    let process = ProcessHandle::open(Pid(pid)).expect("process");
    let ram = map_ram_files("g", pid, &record.ram).expect("RAM");
    let tracker = WriteTracker::attach(&process, &ram, UffdOrigin::Syscall, None).expect("tracker");
    tracker.arm().expect("armed");
    wait_until("writes", Duration::from_secs(20), || !tracker.look(1).expect("look").is_empty());
    kill(pid, Signal::KILL);
    wait_while_alive(pid);
    tracker.look(1).expect_err("it is gone");
}

/// The memory of the guest that is replaced is given back while the new one starts.
#[test]
#[ignore = "long: make test-long"]
fn a_restore_where_there_is_room_for_one_guest() {
    let lab = common::lab();
    let small = SmallDisk::mount(&lab.path().join("small"), "280m").expect("small disk");
    let ram_dir = small.path().display().to_string();
    let spec = GuestSpec::default();
    let line = spec.command(&lab.guest_folder("g").expect("folder")).expect("line");
    let words: Vec<&str> = line.iter().map(String::as_str).collect();
    lab.dewar(&[&["run", "g", "--ram-dir", &ram_dir, "--"], &words[..]].concat()).done();
    let mut guest = lab.reach("g").expect("guest");
    guest.console.ask("fill 100 noise").expect("fill");
    guest.console.ask("check 2000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "g"]).done();
    for how in [&[][..], &[], &["--eager"]] {
        lab.crash("g");
        lab.restore(&mut guest, &[&["g", "--ram-dir", &ram_dir], how].concat()).expect("restore");
        guest.console.ask("verify").expect("consistent");
        lab.wait_for_memory("g");
        assert_eq!(fs::read_dir(small.path()).expect("folder").count(), 1, "one RAM file");
    }
}
