//! Guests that stand in an unusual way, or with which something could not be finished: each
//! can be brought back as it was and be ended, and none is in the way of another.

use crate::common;
use dewar_guest_qemu::{Agent, Qmp};
use dewar_testkit::{
    Console, GuestSpec, Lab, SmallDisk, TestGuest, is_alive, kill, signal_stop, wait_until,
};
use rustix::process::Signal;
use serde_json::json;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

fn small(extra: &[&str]) -> GuestSpec {
    let extra = extra.iter().map(|word| (*word).to_owned()).collect();
    GuestSpec { extra, ..GuestSpec::default() }
}

fn wait_for_state(lab: &Lab, name: &str, state: &str) {
    wait_until(&format!("{name} is {state}"), Duration::from_secs(30), || {
        lab.ps(name).is_some_and(|told| told["state"] == state)
    });
}

fn power_off(lab: &Lab, guest: &mut TestGuest) {
    guest.console.send("quit").expect("quit");
    wait_for_state(lab, &guest.name, "off");
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_is_off_comes_back_off_and_can_be_ended() {
    let lab = common::lab();
    let mut guest = lab.run("g", &small(&["-no-shutdown"])).expect("guest");
    lab.dewar(&["checkpoint", "g", "--tag", "up"]).done();
    power_off(&lab, &mut guest);
    lab.dewar(&["checkpoint", "g", "--tag", "off"]).done();
    lab.dewar(&["stop", "g", "--now"]).done();

    let told = lab.dewar(&["restore", "off"]).done().json();
    assert_eq!((&told["state"], &told["paused"]), (&json!("off"), &json!(false)));
    assert_eq!(lab.ps("g").expect("listed")["state"], "off");
    // Off in place and by the store, too.
    for verb in
        [&["freeze", "g"][..], &["thaw", "g"], &["freeze", "g", "--to-store"], &["thaw", "g"]]
    {
        lab.dewar(verb).done();
    }
    assert_eq!(lab.ps("g").expect("listed")["state"], "off");
    // It is not waited for.
    let began = Instant::now();
    let told = lab.dewar(&["stop", "g"]).done().json();
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert_eq!(told["shut_itself_down"], true);
    lab.restore(&mut guest, &["up"]).expect("restore");
    guest.console.ask("count").expect("it runs");
}

#[test]
fn a_guest_that_powers_off_by_itself_is_not_waited_for() {
    let lab = common::lab();
    let mut guest = lab.run("g", &small(&["-no-shutdown"])).expect("guest");
    let stop = lab.command(&["stop", "g"]).stdout(Stdio::piped()).spawn().expect("stop");
    let began = Instant::now();
    guest.console.send("quit").expect("quit");
    let told = stop.wait_with_output().expect("stop");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(String::from_utf8_lossy(&told.stdout).contains("\"shut_itself_down\":true"));
}

#[test]
fn a_qemu_that_hangs_is_ended_at_once() {
    let lab = common::lab();
    lab.run("g", &small(&[])).expect("guest");
    let pid = lab.pid("g").expect("pid");
    kill(pid, Signal::STOP);
    let began = Instant::now();
    lab.dewar(&["stop", "g", "--now"]).done();
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(!dewar_testkit::is_alive(pid));
}

#[test]
fn a_frozen_guest_is_given_up_only_with_yes() {
    let lab = common::lab();
    let mut guest = lab.run("g", &small(&[])).expect("guest");
    lab.dewar(&["checkpoint", "g", "--tag", "a"]).done();
    lab.dewar(&["freeze", "g"]).done();
    for verb in [&["stop", "g"][..], &["stop", "g", "--now"], &["restore", "a"]] {
        lab.dewar(verb).failed(1, &["what would be lost is its memory", "--yes"]);
        assert_eq!(lab.ps("g").expect("listed")["state"], "frozen", "{verb:?}");
    }
    lab.restore(&mut guest, &["a", "--yes"]).expect("restore");
    guest.console.ask("count").expect("it runs");
    assert!(!lab.root().join("guests/g/sums.json").exists());

    lab.dewar(&["freeze", "g", "--to-store"]).done();
    let told = lab.dewar(&["stop", "g", "--yes"]).done().json();
    assert!(told["lost"].as_str().is_some_and(|it| it.starts_with("nothing")), "{told}");
    assert_eq!(lab.ps("g").expect("listed")["state"], "ended");
    assert!(lab.ram_files("g").is_empty());
    // One that runs gives its place away where it is told to.
    lab.restore(&mut guest, &["a"]).expect("restore");
    let before = lab.pid("g").expect("pid");
    // A copy beside it would take its sockets away.
    lab.dewar(&["restore", "a", "--as", "copy"]).failed(1, &["would lose it"]);
    guest.console.ask("count").expect("it is reached");
    lab.dewar(&["restore", "a"]).failed(1, &["--replace"]);
    assert_eq!(lab.pid("g"), Some(before));
    lab.restore(&mut guest, &["a", "--replace"]).expect("restore");
    guest.console.ask("count").expect("it runs");
    assert!(!dewar_testkit::is_alive(before));
}

#[test]
fn a_guest_that_cannot_be_mended_is_told_of_once_and_is_in_nobodys_way() {
    let lab = common::lab();
    lab.run("broken", &small(&[])).expect("guest");
    let pid = lab.pid("broken").expect("pid");
    let journal = lab.root().join("guests/broken/journal.json");
    fs::write(&journal, "{}").expect("a journal that nobody can read");
    let mut told = lab.dewar(&["ps"]);
    told.clone().failed(5, &["journal.json"]);
    assert!(told.json()["guests"][0]["trouble"].as_str().is_some(), "{told:?}");
    // Again it is only listed; and others go on.
    told = lab.dewar(&["ps"]).done();
    assert!(told.json()["guests"][0]["trouble"].as_str().is_some(), "{told:?}");
    lab.dewar(&["inspect", "broken"]).done();
    let mut other = lab.run("other", &small(&[])).expect("another guest");
    other.console.ask("count").expect("it runs");
    lab.dewar(&["upgrade", "other", "--yes"]).done();
    lab.dewar(&["stop", "other", "--now"]).done();
    lab.dewar(&["rm", "broken", "--force"]).done();
    assert!(!dewar_testkit::is_alive(pid));
    assert!(!lab.root().join("guests/broken").exists());
    assert!(lab.ram_files("broken").is_empty());
}

/// Without a record that can be read its processes and files are found by its name.
#[test]
fn a_guest_whose_record_is_damaged_is_removed_whole() {
    let lab = common::lab();
    lab.run("g", &small(&[])).expect("guest");
    let pid = lab.pid("g").expect("pid");
    fs::write(lab.root().join("guests/g/guest.json"), "not JSON").expect("write");
    lab.dewar(&["rm", "g"]).code_is_a_refusal("rm");
    lab.dewar(&["rm", "g", "--force"]).done();
    assert!(!dewar_testkit::is_alive(pid));
    assert!(lab.ram_files("g").is_empty());
    lab.dewar(&["rm", "g", "--force"]).failed(3, &["no guest"]);
}

/// What keeps QEMU from taking a disk when the guest is to run: it stays as it was before.
#[test]
fn a_guest_that_qemu_does_not_let_run_stays_where_it_was() {
    let lab = common::lab();
    let mut guest = lab.run("g", &small(&[])).expect("guest");
    lab.dewar(&["freeze", "g"]).done();
    let mut user = hold_disk(&guest);
    lab.dewar(&["thaw", "g"]).failed(1, &["stays frozen"]);
    assert_eq!(lab.ps("g").expect("listed")["state"], "frozen");
    assert!(common::qemus(&lab).is_empty());
    user.kill().and_then(|()| user.wait()).expect("qemu-io ends");
    lab.dewar(&["thaw", "g"]).done();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("count").expect("it runs");
}

/// A program that has a guest's disk open to write, with QEMU's locks.
fn hold_disk(guest: &TestGuest) -> Child {
    let disk = guest.folder.join("disk0.qcow2");
    let mut line = Command::new("qemu-io");
    line.args(["-f", "qcow2"]).arg(&disk).stdin(Stdio::piped()).stdout(Stdio::null());
    let child = line.spawn().expect("qemu-io");
    wait_until("qemu-io has it open", Duration::from_secs(10), || {
        let files = fs::read_dir(format!("/proc/{}/fd", child.id())).into_iter().flatten();
        files.flatten().any(|file| fs::read_link(file.path()).is_ok_and(|it| it == disk))
    });
    // It takes its locks just after: that others may not write is the byte 201 (block/file-posix.c).
    let file = fs::File::open(&disk).expect("disk");
    wait_until("its locks", Duration::from_secs(10), || {
        dewar_kernel::is_byte_locked(&file, 201).expect("lock")
    });
    child
}

/// A page server that somebody stopped serves nobody: another takes its place.
#[test]
#[ignore = "long: make test-long"]
fn a_page_server_that_stands_is_replaced() {
    let lab = common::lab();
    let spec = GuestSpec { memory_mib: 512, ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("fill 300 noise").expect("fill");
    lab.dewar(&["checkpoint", "g"]).done();
    lab.crash("g");
    lab.restore(&mut guest, &["g"]).expect("restore");
    let server = lab.pid_on_record("g", "server");
    kill(server, Signal::STOP);
    wait_until("it to stand", Duration::from_secs(10), || signal_stop(server) || !is_alive(server));
    if lab.ps("g").expect("listed")["lazy_restore"]["complete"] == true {
        println!("SKIPPED a_page_server_that_stands_is_replaced: all memory had arrived");
        return;
    }
    lab.dewar(&["restore", "g"]).done();
    assert!(!dewar_testkit::is_alive(server));
    guest.console.ask("filled").expect("its memory");
}

/// Somebody stops the command in the pause, alone or with its guardian, or it hangs: the
/// guest runs again soon, and no checkpoint was made.
#[test]
fn a_pause_ends_whatever_becomes_of_the_command() {
    let lab = common::lab();
    let mut guest = lab.run("g", &small(&[])).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    for (how, guardian_too) in [("stop", false), ("stop", true), ("hang", false)] {
        for (verb, step) in [("checkpoint", "state-saved"), ("freeze", "writing its state")] {
            if how == "hang" && verb == "freeze" {
                // As long as it is at work its guest stands still: that is what it is for.
                continue;
            }
            let case = format!("{verb}: {how}, {guardian_too}");
            let mut command = lab.command(&[verb, "g"]);
            command.env("DEWAR_TEST_SIGNAL", format!("{step}:{how}"));
            // Long enough for what is done below while it stands.
            let limit = match how {
                "hang" => "2",
                _ if guardian_too => "10",
                _ => "5",
            };
            command.env("DEWAR_TEST_PAUSE_LIMIT", limit);
            let began = Instant::now();
            let mut child =
                command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect(verb);
            let pid = child.id() as i32;
            if how == "stop" {
                wait_until("it stands", Duration::from_secs(20), || {
                    dewar_testkit::signal_stop(pid)
                });
            } else {
                child.wait().expect("its guardian ends it");
            }
            if guardian_too {
                let guardian = common::started(pid, "__guardian").expect("a guardian");
                kill(guardian, Signal::STOP);
            }
            guest.console.ask("verify").unwrap_or_else(|error| panic!("{case}: {error}"));
            assert!(began.elapsed() < Duration::from_secs(60), "{case}: {:?}", began.elapsed());
            // What stands is the parent of the command that was ended.
            kill(pid, Signal::CONT);
            child.wait().expect("wait");
            wait_for_state(&lab, "g", "running");
            let listed = lab.dewar(&["ls"]).done().json();
            assert_eq!(listed["checkpoints"], json!([]), "{case}");
        }
    }
    lab.dewar(&["checkpoint", "g"]).done();
}

/// RAM files are sparse: what others were promised is not free, though nobody took it yet.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_is_not_admitted_to_memory_that_others_were_promised() {
    // Its guests boot: a state that is loaded into one takes all of its memory.
    let lab = Lab::new(env!("CARGO_BIN_EXE_dewar")).expect("lab");
    let disk = SmallDisk::mount(&lab.path().join("ram"), "400m").expect("mount");
    let place = disk.path().display().to_string();
    let run = |name: &str, more: &[&str]| {
        let run_words = [&["--ram-dir", &place][..], more].concat();
        let run_words = run_words.into_iter().map(str::to_owned).collect();
        lab.run(name, &GuestSpec { disks: Vec::new(), run_words, ..GuestSpec::default() })
    };
    run("one", &[]).expect("guest");
    lab.dewar(&["checkpoint", "one"]).done();
    let refused = run("two", &[]).expect_err("no room").to_string();
    for word in ["exit code 4", "256 MiB", "promised to guests", "--overcommit"] {
        assert!(refused.contains(word), "{word}: {refused}");
    }
    let restore = ["restore", "one", "--as", "two", "--ram-dir", &place];
    lab.dewar(&restore).failed(4, &["promised to guests"]);
    // One whose place a restore takes is promised nothing any more.
    lab.dewar(&["restore", "one", "--replace", "--ram-dir", &place]).done();
    lab.dewar(&["stop", "one", "--now"]).done();
    let mut one = run("one", &[]).expect("guest");

    // A user who takes the risk learns why a guest ended.
    let mut two = run("two", &["--overcommit"]).expect("guest");
    let one = std::thread::spawn(move || one.console.ask("fill 190 noise").is_ok());
    let two = two.console.ask("fill 190 noise").is_ok();
    assert!(!(one.join().expect("thread") && two), "both found room");
    let listed = lab.dewar(&["ps"]).done().json();
    let guests = listed["guests"].as_array().expect("guests");
    let ended = guests.iter().find(|it| it["state"] == "ended").expect("one ended");
    let why = ended["ended_because"].as_str().unwrap_or_default();
    assert!(why.contains("no room left"), "{listed}");
    assert!(lab.dewar(&["doctor"]).stdout.contains("no room left"));
}

/// What gives a guest an agent's port.
fn agent_port(folder: &Path) -> [String; 6] {
    let socket = format!("socket,id=qga,path={},server=on,wait=off", folder.join("qga").display());
    let port = "virtserialport,chardev=qga,name=org.qemu.guest_agent.0";
    ["-device", "virtio-serial", "-chardev", &socket, "-device", port].map(str::to_owned)
}

/// A guest that has an agent's port, and what else is on the line. The agent is not started.
fn with_agent_port(lab: &Lab, extra: &[&str]) -> TestGuest {
    let port = agent_port(&lab.guest_folder("g").expect("folder"));
    let line = [&port.each_ref().map(String::as_str), extra].concat();
    lab.run("g", &GuestSpec { has_agent: true, ..small(&line) }).expect("guest")
}

/// How far a guest's clock is behind the host's.
fn seconds_behind(guest: &mut TestGuest) -> u64 {
    let told = guest.console.ask_number("time").expect("time");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    now.as_secs().saturating_sub(told)
}

fn start_agent(guest: &mut TestGuest) {
    // Its port is named after the place of its device among all virtio ones.
    for place in 0..4 {
        let line = format!("spawn qemu-ga -m virtio-serial -p /dev/vport{place}p1");
        guest.console.ask(&line).expect("spawn");
    }
    let port = agent_port(&guest.folder);
    wait_until("the agent", Duration::from_secs(60), || {
        let agent = Agent::of(&port, &guest.folder, Duration::from_secs(1));
        agent.expect("it has a port").is_ok()
    });
}

/// A copy meets the first guest's network only with addresses of its own.
#[test]
#[ignore = "long: make test-long"]
fn a_copy_with_a_new_identity_has_addresses_of_its_own() {
    const OLD: &str = "52:54:00:00:27:19";
    let lab = common::lab();
    let card = format!("virtio-net-pci,netdev=n0,mac={OLD}");
    let mut guest = with_agent_port(&lab, &["-netdev", "user,id=n0", "-device", &card]);
    guest.console.ask("net 10.0.2.15/24").expect("net");
    start_agent(&mut guest);
    let address = |guest: &mut TestGuest| {
        guest.console.ask("show /sys/class/net/eth0/address").expect("address")
    };
    let carrier = |guest: &mut TestGuest, is: &str| {
        wait_until(&format!("carrier {is}"), Duration::from_secs(10), || {
            guest.console.ask("show /sys/class/net/eth0/carrier").is_ok_and(|it| it.contains(is))
        });
    };
    lab.dewar(&["checkpoint", "g", "--tag", "first"]).done();
    // One whose card the agent will not find.
    guest.console.ask("spawn ip link set dev eth0 address 52:54:00:99:99:99").expect("ip");
    wait_until("another address", Duration::from_secs(10), || {
        address(&mut guest).contains("99:99")
    });
    lab.dewar(&["checkpoint", "g", "--tag", "unknown"]).done();
    lab.crash("g");

    let line = ["first", "--as", "copy", "--new-identity", "--eager"];
    let told = lab.restore(&mut guest, &line).expect("restore").json();
    let new = told["new_addresses"][OLD].as_str().unwrap_or_default().to_owned();
    assert!(new.starts_with("52:54:00:") && new != OLD, "{told}");
    assert!(address(&mut guest).contains(&new));
    carrier(&mut guest, "1");
    assert!(lab.dewar(&["inspect", "copy"]).stdout.contains(&new), "the next boot has it, too");

    lab.crash("copy");
    let line = ["restore", "unknown", "--as", "other", "--new-identity", "--eager"];
    let failed = lab.dewar(&line);
    failed.failed(5, &["no interface has the address", OLD, "the guest is there, and cables"]);
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    carrier(&mut guest, "0");

    lab.crash("other");
    lab.dewar(&["restore", "first", "--as", "third", "--paused"]).done();
    lab.dewar(&["checkpoint", "third", "--tag", "paused"]).done();
    let line = ["restore", "paused", "--as", "third", "--new-identity", "--replace"];
    lab.dewar(&line).failed(4, &["does not run", "no guest was started"]);
    assert_eq!(lab.ps("third").expect("it is kept")["state"], "paused");
    lab.dewar(&["restore", "first", "--new-identity"]).failed(2, &["--as"]);
}

/// A guest that was away is told what time it is, where an agent of its own listens.
#[test]
#[ignore = "long: make test-long"]
fn the_clock_of_a_guest_that_comes_back_is_set() {
    let lab = common::lab();
    let mut guest = with_agent_port(&lab, &[]);
    lab.dewar(&["checkpoint", "g", "--tag", "before"]).done();
    start_agent(&mut guest);
    lab.dewar(&["checkpoint", "g", "--tag", "agent"]).done();
    std::thread::sleep(Duration::from_secs(6));

    let told = lab.restore(&mut guest, &["before", "--replace"]).expect("restore").json();
    assert_eq!(told["clock"]["set"], false, "{told}");
    assert!(told["clock"]["behind_ms"].as_u64() > Some(5_000), "{told}");
    let behind = seconds_behind(&mut guest);
    assert!(behind >= 5, "{behind} s");

    for (line, is_set) in
        [(&["agent", "--replace"][..], true), (&["agent", "--replace", "--clock", "keep"], false)]
    {
        let told = lab.restore(&mut guest, line).expect("restore").json();
        assert_eq!(told["clock"]["set"], is_set, "{told}");
        let behind = seconds_behind(&mut guest);
        assert_eq!(behind <= 2, is_set, "{line:?}: {behind} s");
    }
}

/// A guest that powers itself off while it is captured has not crashed.
#[test]
fn a_guest_that_powers_off_in_a_checkpoint_is_told_of_as_it_is() {
    let lab = common::lab();
    let socket = lab.path().join("user-qmp");
    let port = format!("unix:{},server=on,wait=off", socket.display());
    for (extra, words) in [
        (&[][..], ["powered itself off meanwhile", "no checkpoint was made"]),
        (&["-no-shutdown"], ["has powered off", "no checkpoint was made"]),
    ] {
        let spec = small(&[extra, &["-qmp", &port]].concat());
        let mut guest = lab.run("g", &spec).expect("guest");
        let held = common::HeldCheckpoint::at(&lab, "g", "armed");
        let pid = lab.pid("g").expect("pid");
        guest.console.send("quit").expect("quit");
        if extra.is_empty() {
            dewar_testkit::wait_while_alive(pid);
        } else {
            let mut qmp = Qmp::connect(&socket).expect("QMP");
            wait_until("it is off", Duration::from_secs(30), || {
                qmp.execute("query-status", json!({})).expect("QMP")["status"] == "shutdown"
            });
        }
        let (code, _, said) = held.go_on();
        assert_eq!(code, 1, "{said}");
        for word in words {
            assert!(said.contains(word), "{said}");
        }
        assert!(!said.contains("No such process") && !said.contains("newest checkpoint"), "{said}");
        lab.dewar(&["rm", "g", "--force"]).done();
    }
}
