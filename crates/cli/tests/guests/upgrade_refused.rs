//! New QEMUs that are none, and guests that cannot move: found out before the
//! guest is touched, or undone.

use crate::common;
use dewar_testkit::{Console, GuestSpec, Lab, TestGuest, is_alive, next_qemu, wait_until};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

fn guest(lab: &Lab, extra: &[&str]) -> TestGuest {
    let extra = extra.iter().map(|word| (*word).to_owned()).collect();
    let mut guest = lab.run("g", &GuestSpec { extra, ..GuestSpec::default() }).expect("guest");
    guest.console.ask("check 2000 1 disk").expect("check");
    guest
}

/// That the guest runs on in its old QEMU, over its old sockets.
fn assert_untouched(lab: &Lab, guest: &mut TestGuest, pid: i32, after: &str) {
    assert_eq!(lab.pid("g"), Some(pid), "{after}");
    assert_eq!(lab.ps("g").expect("listed")["state"], "running", "{after}");
    let folder = lab.root().join("guests/g");
    for file in ["handover.json", "journal.json", "qmp.sock~"] {
        assert!(!folder.join(file).exists(), "{file} is left by {after}");
    }
    assert!(!guest.folder.join("console~").exists(), "{after}");
    guest.console.ask("verify").unwrap_or_else(|error| panic!("{after}: {error}"));
}

/// Makes a file in the lab's folder; returns its path.
fn program_in(lab: &Lab, name: &str, content: &[u8], mode: u32) -> String {
    let path = lab.path().join(name);
    fs::write(&path, content).expect("program");
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("mode");
    path.display().to_string()
}

/// On its own: its socket is waited for, half a minute.
#[test]
#[ignore = "long: make test-long"]
fn a_program_that_hangs_leaves_the_guest_alone() {
    let lab = common::lab();
    let mut guest = guest(&lab, &[]);
    let pid = lab.pid("g").expect("pid");
    let program = program_in(&lab, "hangs", b"#!/bin/sh\nexec sleep 600\n", 0o755);
    lab.dewar(&["upgrade", "g", "--qemu", &program]).failed(1, &["does not offer its QMP socket"]);
    assert_untouched(&lab, &mut guest, pid, &program);
}

#[test]
fn programs_that_are_no_qemu_leave_the_guest_alone() {
    let lab = common::lab();
    let mut guest = guest(&lab, &[]);
    let pid = lab.pid("g").expect("pid");
    let program = |name: &str, content: &[u8], mode| program_in(&lab, name, content, mode);
    // The beginning of a program for ARM.
    let mut foreign = vec![0; 64];
    foreign[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\xb7\0");
    let cases = [
        ("missing".to_owned(), "there is no program"),
        (program("text", b"not a program", 0o644), "did not start"),
        (program("foreign", &foreign, 0o755), "did not start"),
        (program("silent", b"#!/bin/sh\nexit 0\n", 0o755), "ended without a word"),
        (program("broken", b"#!/bin/sh\necho no such luck >&2\nexit 1\n", 0o755), "no such luck"),
        // It takes no notice of the RAM file.
        (
            program(
                "deaf",
                b"#!/bin/sh\nfor word; do case $word in socket,id=dewar-qmp*) qmp=$word;; esac; done\n\
                exec qemu-system-x86_64 -nodefaults -display none -m 64 -chardev \"$qmp\" \
                -mon chardev=dewar-qmp,mode=control\n",
                0o755,
            ),
            "does not use the RAM file",
        ),
    ];
    for (program, words) in &cases {
        lab.dewar(&["upgrade", "g", "--qemu", program]).failed(1, &[words]);
        assert_untouched(&lab, &mut guest, pid, program);
    }
    // The same to one whose own QEMU came by an upgrade.
    lab.dewar(&["upgrade", "g"]).done();
    let next = lab.pid("g").expect("pid");
    assert_ne!(next, pid);
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    for (program, words) in &cases[..5] {
        lab.dewar(&["upgrade", "g", "--qemu", program]).failed(1, &[words]);
        assert_untouched(&lab, &mut guest, next, program);
    }
    lab.dewar(&["upgrade", "nobody"]).failed(3, &["nobody"]);
}

#[test]
#[ignore = "long: make test-long"]
fn a_qemu_that_lacks_a_device_leaves_the_guest_alone() {
    let Some(next) = next_qemu() else {
        println!("SKIPPED a_qemu_that_lacks_a_device: there is no second QEMU");
        return;
    };
    let lab = common::lab();
    let (one, other) = (next.display().to_string(), dewar_testkit::qemu());
    let Some((device, newer, older)) = lacking(&one, &other).or_else(|| lacking(&other, &one))
    else {
        println!("SKIPPED a_qemu_that_lacks_a_device: both have all that are known to it");
        return;
    };
    let folder = lab.guest_folder("g").expect("folder");
    let extra = ["-machine", "pc-q35-7.2", "-device", device].map(str::to_owned).to_vec();
    let mut line = GuestSpec { extra, ..GuestSpec::default() }.command(&folder).expect("line");
    line[0] = newer.to_owned();
    let words: Vec<&str> = line.iter().map(String::as_str).collect();
    lab.dewar(&[&["run", "g", "--"], &words[..]].concat()).done();
    let mut guest = lab.reach("g").expect("guest");
    guest.console.ask("check 2000 1 disk").expect("check");
    let pid = lab.pid("g").expect("pid");
    lab.dewar(&["upgrade", "g", "--qemu", older]).failed(1, &[device, "is running"]);
    assert_untouched(&lab, &mut guest, pid, "a missing device");
}

/// A device that `newer` has and `older` lacks, and the two: new in 8.0, and in 10.0.
fn lacking<'p>(newer: &'p str, older: &'p str) -> Option<(&'static str, &'p str, &'p str)> {
    let has = |qemu: &str, device: &str| {
        let options = Command::new(qemu).args(["-device", &format!("{device},help")]).output();
        String::from_utf8_lossy(&options.expect("QEMU").stdout).contains(" options")
    };
    let device = ["igb", "vmclock"].into_iter().find(|it| has(newer, it) && !has(older, it))?;
    Some((device, newer, older))
}

#[test]
fn what_cannot_be_handed_over_is_told_before() {
    let lab = common::lab();
    let mut guest = guest(&lab, &["-netdev", "socket,id=n0,listen=127.0.0.1:0"]);
    let pid = lab.pid("g").expect("pid");
    let refused = lab.dewar(&["upgrade", "g"]);
    refused.failed(4, &["-netdev socket", "cannot be handed over", "was not touched"]);
    assert_untouched(&lab, &mut guest, pid, "a socket netdev");
    // All that can be, and the one that cannot is named.
    let all = lab.dewar(&["upgrade", "--all"]);
    assert_eq!(all.code, 4, "{all:?}");
    assert_eq!(all.json()["guests"][0]["exit_code"], 4);
    lab.dewar(&["stop", "g", "--now"]).done();
    assert!(!is_alive(pid));
    lab.dewar(&["upgrade", "g"]).failed(1, &["has ended"]);
    let none = lab.command(&["upgrade"]).stderr(Stdio::null()).status().expect("dewar");
    assert_eq!(none.code(), Some(2));
}

/// A software TPM with a state of its own, at a socket.
struct Tpm {
    state: tempfile::TempDir,
}

impl Tpm {
    fn start(socket: &Path) -> Self {
        let state = tempfile::tempdir().expect("folder");
        let folder = format!("dir={}", state.path().display());
        let at = format!("type=unixio,path={}", socket.display());
        let line =
            ["socket", "--tpm2", "--tpmstate", &folder, "--ctrl", &at, "--terminate", "--daemon"];
        let started = Command::new("swtpm").args(line).status().expect("swtpm");
        assert!(started.success());
        Self { state }
    }

    /// What it keeps when it is off: seeds, keys, NV storage.
    fn kept(&self) -> Vec<u8> {
        fs::read(self.state.path().join("tpm2-00.permall")).expect("state")
    }
}

/// Every guest that virt-manager makes for Windows has both.
#[test]
#[ignore = "long: make test-long"]
fn spice_and_a_tpm_move_by_freeze_and_thaw_and_a_checkpoint_has_the_tpm() {
    let lab = common::lab();
    let folder = lab.guest_folder("g").expect("folder");
    let (socket, display) = (folder.join("tpm"), folder.join("spice"));
    let first = Tpm::start(&socket);
    let chardev = format!("socket,id=t,path={}", socket.display());
    let tpm = [
        "-chardev",
        &chardev,
        "-tpmdev",
        "emulator,id=t0,chardev=t",
        "-device",
        "tpm-crb,tpmdev=t0",
    ];
    let listens = format!("unix=on,addr={},disable-ticketing=on", display.display());
    let spice = ["-spice", &listens, "-device", "qxl-vga", "-device", "virtio-serial"];
    let told = Command::new("qemu-system-x86_64").args(["-spice", "help"]).output().expect("QEMU");
    // It lists them, and ends with an error.
    let has_spice = String::from_utf8_lossy(&told.stdout).contains("spice options");
    let mut extra = tpm.to_vec();
    match has_spice {
        true => extra.extend(spice),
        false => println!("SKIPPED SPICE of this test: this QEMU has none"),
    }
    let mut guest = guest(&lab, &extra);
    let pid = lab.pid("g").expect("pid");
    lab.dewar(&["upgrade", "g"]).failed(4, &["'dewar freeze'", "was not touched"]);
    assert_untouched(&lab, &mut guest, pid, "a TPM");
    lab.dewar(&["checkpoint", "g", "--tag", "with"]).done();

    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).failed(4, &["its TPM is not there", "swtpm", "stays frozen"]);
    // A new one: what it is comes from the guest.
    let second = Tpm::start(&socket);
    lab.dewar(&["thaw", "g"]).done();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
    assert!(!has_spice || UnixStream::connect(&display).is_ok(), "SPICE is reached again");
    assert!(second.kept() == first.kept(), "the TPM is the guest's");

    lab.dewar(&["stop", "g", "--now"]).done();
    let ended = || UnixStream::connect(&socket).is_err();
    wait_until("the TPM ends with its QEMU", Duration::from_secs(10), ended);
    let third = Tpm::start(&socket);
    lab.restore(&mut guest, &["with"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    assert!(third.kept() == first.kept(), "the checkpoint has the TPM");
}
