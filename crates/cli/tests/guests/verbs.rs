//! Each verb as a person or a program meets it.

use crate::common;
use dewar_testkit::{GuestSpec, qemu};
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

fn dewar(arguments: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_dewar")).args(arguments).output().expect("dewar");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.code().unwrap_or(-1), text)
}

#[test]
fn every_verb_has_help_with_an_example() {
    let (_, all) = dewar(&["--help"]);
    assert!(!all.contains("__"), "hidden verbs are hidden");
    let commands =
        all.split("Commands:\n").nth(1).expect("commands").split("\n\n").next().expect("commands");
    let verbs = commands
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|verb| *verb != "help");
    let verbs: Vec<&str> = verbs.collect();
    assert!(verbs.contains(&"run") && verbs.contains(&"man"), "{all}");
    for verb in verbs {
        let (code, text) = dewar(&[verb, "--help"]);
        assert_eq!(code, 0);
        let examples = ["Example:\n  dewar ", "Examples:\n  dewar "];
        assert!(examples.iter().any(|words| text.contains(words)), "{verb}: {text}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(dewar(&["completions", shell]).1.contains("checkpoint"));
    }
    let folder = tempfile::tempdir().expect("tempdir");
    assert_eq!(dewar(&["man", folder.path().to_str().expect("path")]).0, 0);
    for page in ["dewar.1", "dewar-checkpoint.1", "dewar-restore.1"] {
        assert!(folder.path().join(page).exists(), "{page}");
    }
    for usage in [&["nonsense"][..], &["checkpoint"], &["checkpoint", "g", "--max-pause", "soon"]] {
        assert_eq!(dewar(usage).0, 2, "{usage:?}");
    }
}

#[test]
fn guests_are_started_listed_stopped_and_removed() {
    let lab = common::lab();
    let qemu = qemu();
    let pid_file = lab.path().join("pid").display().to_string();
    let base = ["--", qemu.as_str(), "-nodefaults", "-m", "64M"];
    let lines: [(&str, &[&str]); 3] = [
        ("plain", &["-display", "none"]),
        ("daemon", &["-display", "none", "-daemonize", "-pidfile", &pid_file]),
        ("serial", &["-nographic", "-serial", "mon:stdio"]),
    ];
    for (name, line) in lines {
        let told = lab.dewar(&[&["run", name], &base[..], line].concat()).done().json();
        assert_eq!(told["memory_bytes"], 64 << 20);
        let pid = told["pid"].as_i64().expect("pid");
        assert_eq!(lab.pid(name), Some(pid as i32));
        let inspected = lab.dewar(&["inspect", name]).done().json();
        assert_eq!(inspected["state"], "running");
        assert_eq!(inspected["problems"], json!([]));
        // The user's own line is remembered as it was given.
        assert_eq!(inspected["guest"]["arguments"][0], "-nodefaults");
        lab.dewar(&[&["run", name], &base[..], line].concat()).failed(1, &["already"]);
        lab.dewar(&["rm", name]).failed(1, &["is running"]);
    }
    let written = std::fs::read_to_string(&pid_file).expect("pid file");
    assert_eq!(lab.pid("daemon"), written.trim().parse().ok(), "the daemon's pid is known");
    assert_eq!(lab.dewar(&["ps"]).json()["guests"].as_array().expect("list").len(), 3);
    // Nothing in it listens to the power button.
    let told = lab.dewar(&["stop", "plain", "--timeout", "100ms"]).done().json();
    assert_eq!(told["shut_itself_down"], false);
    lab.dewar(&["stop", "plain"]).failed(1, &["has ended"]);
    lab.dewar(&["checkpoint", "plain"]).failed(1, &["has ended", "dewar restore plain"]);
    lab.dewar(&["rm", "plain"]).done();
    lab.dewar(&["rm", "plain"]).failed(3, &["no guest 'plain'"]);
    for name in ["daemon", "serial"] {
        lab.dewar(&["rm", name, "--force"]).done();
    }
    let left: Vec<_> = lines.iter().flat_map(|(name, _)| lab.ram_files(name)).collect();
    assert!(left.is_empty(), "no RAM file is left: {left:?}");
}

#[test]
fn a_checkpoint_tells_what_it_promises() {
    let lab = common::lab();
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    let told = lab.dewar(&["checkpoint", "g", "--tag", "t", "--codec", "lz4"]).done().json();
    assert_eq!(told["guest"], "g");
    assert_eq!(told["tag"], "t");
    assert_eq!(told["memory_bytes"], 256 << 20);
    assert_eq!(told["pages"]["total"], 65536);
    let number = |value: &serde_json::Value| value.as_u64().expect("a number");
    assert_eq!(number(&told["pages"]["zero"]) + number(&told["pages"]["stored"]), 65536);
    assert!(number(&told["stored_bytes"]) > 0);
    assert!(told["pause_ms"].as_f64().expect("pause") > 0.0);
    assert!(told["total_ms"].as_f64() > told["pause_ms"].as_f64());
    assert!(told["epochs"][0]["at_ms"].is_f64() && told["epochs"][0]["dirty_pages"].is_u64());
    assert_eq!(told["store"], format!("file:{}", lab.store().display()));
    let id = told["checkpoint"].as_str().expect("id").to_owned();
    let listed = lab.dewar(&["ls"]).done().json();
    assert_eq!(listed["checkpoints"][0]["checkpoint"], id.as_str());
    assert_eq!(lab.dewar(&["ls", "--guest", "other"]).json()["checkpoints"], json!([]));

    // Two commands on one guest: the second is told so.
    let held = common::HeldCheckpoint::at(&lab, "g", "armed");
    lab.dewar(&["checkpoint", "g"]).failed(1, &["another dewar command"]);
    assert_eq!(lab.ps("g").expect("listed")["state"], "busy");
    assert_eq!(held.go_on().0, 0);

    // A copy under another name beside the first would fight for its ports;
    // of a guest without any, both run.
    lab.dewar(&["delete", &id]).done();
    lab.dewar(&["restore", &id]).failed(3, &["no checkpoint"]);
    lab.dewar(&["restore", "g"]).failed(1, &["a guest 'g' already"]);
    guest.console.ask("count").expect("the guest runs on");
    let told = lab.dewar(&["stop", "g", "--timeout", "100ms"]).done().json();
    assert_eq!(told["name"], "g");
    lab.restore(&mut guest, &["g", "--as", "second", "--eager"]).expect("restore");
    assert_eq!(lab.ps("second").expect("listed")["state"], "running");
    std::thread::sleep(Duration::from_millis(100));
    guest.console.ask("count").expect("it goes on");
    let newest = lab.dewar(&["ls"]).json()["checkpoints"][0]["checkpoint"].clone();
    let newest = newest.as_str().expect("id");
    lab.dewar(&["delete", newest]).failed(1, &["guest 'second'", "dewar rm second"]);
    lab.dewar(&["rm", "second", "--force"]).done();
    lab.dewar(&["delete", newest]).done();
}

#[test]
fn a_pause_longer_than_was_asked_for_says_why() {
    let lab = common::lab();
    // Memory of displays, which is saved in the pause.
    let extra = ["-device", "bochs-display,vgamem=256M"].repeat(3);
    let extra = extra.into_iter().map(str::to_owned).collect();
    let spec = GuestSpec { extra, boots: false, ..GuestSpec::default() };
    let _guest = lab.run("g", &spec).expect("guest");
    let told = Command::new(env!("CARGO_BIN_EXE_dewar"))
        .arg("--root")
        .arg(lab.root())
        .args(["checkpoint", "g", "--max-pause", "1ms"])
        .output()
        .expect("dewar");
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    // Mostly QEMU took it; what took longest is told, and a busy host may have done so in any step.
    let why = told.split("the pause was longer than --max-pause 1.0 ms: ").nth(1).expect(&told);
    let reasons = ["QEMU took ", " of it went by until '", "the guest still wrote "];
    assert!(reasons.iter().any(|reason| why.contains(reason)), "{told}");
}

/// What others must not read is its owner's alone, wherever it is.
#[test]
fn a_guests_files_are_its_owners_alone() {
    let lab = common::lab();
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    lab.dewar(&["checkpoint", "g"]).done();
    lab.crash("g");
    lab.restore(&mut guest, &["g"]).expect("restore");
    lab.wait_for_memory("g");
    let held = common::HeldCheckpoint::at(&lab, "g", "resumed");
    let folder = lab.root().join("guests/g");
    let mode = |path: &Path| path.metadata().expect("there").mode() & 0o777;
    assert_eq!(mode(&folder), 0o700);
    let files = [common::files(&folder), lab.ram_files("g"), common::files(&lab.store())].concat();
    assert!(files.len() > 8, "{files:?}");
    for path in files.iter().filter(|path| path.is_file()) {
        assert_eq!(mode(path) & 0o077, 0, "{}", path.display());
    }
    assert_eq!(held.go_on().0, 0);
    let told = lab.dewar(&["inspect", "g"]).done().json();
    let current = folder.join("disk-0.qcow2").display().to_string();
    assert_eq!(told["disks"][0]["current_file"], current, "{told}");
}

#[test]
fn a_host_that_lacks_something_is_told_so() {
    let lab = common::lab();
    lab.dewar(&["doctor"]).done();
    let lacking = lab.command(&["doctor"]).env("PATH", lab.path()).output().expect("dewar");
    let lacking = dewar_testkit::Ran::of(&lacking).failed(4, &["lacks something"]);
    let findings = lacking.json()["findings"].clone();
    let missing = findings.as_array().into_iter().flatten().find(|it| it["name"] == "qemu-img");
    let missing = missing.expect("looked for");
    assert!(missing["ok"] == false && missing["required"] == true, "{missing}");
}

/// The output of a command that nobody takes any more is no failure of what it did.
#[test]
fn what_is_told_to_nobody_was_done_all_the_same() {
    let lab = common::lab();
    // The last would go on for ever.
    for words in [&["doctor"][..], &["ps", "--json"], &["qos", "--status", "--watch"]] {
        let nobody = std::fs::File::options().write(true).open("/dev/full").expect("open");
        let mut dewar = std::process::Command::new("timeout");
        dewar
            .args(["20", env!("CARGO_BIN_EXE_dewar"), "--root"])
            .arg(lab.root())
            .args(words)
            .stdout(nobody);
        let ran = dewar.output().expect("dewar starts");
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!((ran.status.code(), said.as_ref()), (Some(0), ""), "{words:?}");
    }
}
