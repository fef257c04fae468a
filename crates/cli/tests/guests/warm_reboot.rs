//! Disks that Dewar serves, and what of them outlives a reboot of the guest's OS.

use crate::common::{self, assert_exact};
use crate::served_guest::{How, Warm, is_warm, make_disk, ours};
use dewar_testkit::{
    GuestSpec, TestGuest, kill, next_qemu, rounds, sample, wait_until, wait_while_alive,
};
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use std::fs::File;
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn what_a_guest_had_read_it_has_after_a_reset_of_any_kind() {
    let mut warm = Warm::new("cache=warm");
    // By itself, by a panic, from outside, and by sysrq-b.
    let ways =
        ["spawn reboot -f", "append /proc/sysrq-trigger c", "", "append /proc/sysrq-trigger b"];
    for (held, way) in (1..).zip(sample("kinds of resets", ways.to_vec(), 2)) {
        warm.ask("run dd if=/dev/zero of=/mnt/written bs=64k count=16 conv=fsync");
        if way.is_empty() {
            let told = warm.lab.dewar(&["reboot", "g", "--now"]).done().json();
            assert!(told["search"]["kept"].as_u64() > Some(12_000), "{told}");
        } else {
            warm.guest.console.send(way).expect(way);
        }
        warm.is_up();
        is_warm(&mut warm, held);
    }
    // Off is off.
    warm.ask("run sync");
    warm.guest.console.send("spawn poweroff -f").expect("poweroff");
    wait_until("the end", Duration::from_secs(20), || {
        warm.lab.ps("g").is_some_and(|it| it["state"] == "ended")
    });
    warm.lab.dewar(&["rm", "g"]).done();
    wait_until("the end of ours", Duration::from_secs(20), || {
        ours(&warm.lab, "__disks").is_empty() && ours(&warm.lab, "__disk-server").is_empty()
    });
    assert!(!warm.lab.root().join("guests/g").exists());
    let mut fsck = Command::new("e2fsck");
    // After crashes its journal is played first.
    fsck.args(["-f", "-y"]).arg(&warm.disk).stdout(Stdio::null());
    assert!(fsck.status().expect("e2fsck").code().is_some_and(|code| code <= 1));
    fsck = Command::new("e2fsck");
    fsck.args(["-f", "-n"]).arg(&warm.disk);
    assert!(fsck.status().expect("e2fsck").success());
}

#[test]
fn killed_at_any_time_no_block_is_lost_and_the_guest_sees_no_error() {
    let lab = common::lab();
    let served = lab.path().join("plain.raw");
    File::create(&served).and_then(|it| it.set_len(64 << 20)).expect("disk");
    let served = vec![format!("{},cache=warm", served.display())];
    let spec = GuestSpec { disks: Vec::new(), served, ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    // Writes blocks past its own cache, and knows what each must hold.
    guest.console.ask("check 200 1 disk").expect("writer");
    let mut count = 0;
    let mut goes_on = |guest: &mut TestGuest| {
        wait_until("the writer to go on", Duration::from_secs(30), || {
            let now = guest.console.ask("count").expect("count").parse::<u64>().expect("number");
            std::mem::replace(&mut count, now) < now
        });
        guest.console.ask("verify").expect("all as it was left");
    };
    let kills = [&["__disk-server"][..], &["__disks"], &["__disk-server", "__disks"]];
    for verbs in kills.repeat(rounds("kills of the server and its supervisor", 3, 1)) {
        goes_on(&mut guest);
        for verb in verbs {
            // One that was not needed ends by itself.
            let mut pids = Vec::new();
            wait_until("one of each", Duration::from_secs(20), || {
                pids = ours(&lab, verb);
                pids.len() == 1
            });
            kill(pids[0], Signal::KILL);
            // A command that sees it end would wait for the other one to start it.
            wait_while_alive(pids[0]);
        }
        if verbs.len() == 2 {
            // Nobody is left to start the other one.
            lab.dewar(&["ps"]).done();
        }
        wait_until("both to be there", Duration::from_secs(20), || {
            ["__disk-server", "__disks"].iter().all(|verb| ours(&lab, verb).len() == 1)
        });
        goes_on(&mut guest);
    }
}

#[test]
fn a_supervisor_that_dies_at_any_step_leaves_no_guest_held() {
    // 'make test' tries the first and the last: the first is in the middle of the exchange.
    let steps = ["mapped", "held", "made", "exchanged", "reset"];
    for step in sample("supervisors that die", steps.to_vec(), 2) {
        let signal = format!("{step}:kill");
        let mut warm = Warm::started(&How {
            disk: "cache=warm",
            environment: &[("DEWAR_TEST_SIGNAL", &signal)],
            ..How::default()
        });
        let before = ours(&warm.lab, "__disks");
        warm.reboot();
        let sums = warm.sums.clone();
        assert_eq!(warm.read_all(), sums, "{step}");
        assert_ne!(ours(&warm.lab, "__disks"), before, "{step}");
        // Nothing lies about.
        assert_eq!(warm.lab.ram_files("g").len(), 1, "{step}");
        warm.lab.dewar(&["stop", "g", "--now"]).done();
    }
}

#[test]
#[ignore = "long: make test-long"]
fn another_qemu_and_a_freeze_leave_the_disks_served_and_the_next_reboot_warm() {
    let mut warm = Warm::new("cache=warm");
    let mut upgrade = vec!["upgrade", "g", "--yes"];
    let next = next_qemu().map(|it| it.display().to_string());
    upgrade.extend(next.iter().flat_map(|it| ["--qemu", it]));
    warm.lab.dewar(&upgrade).done();
    warm.is_again();
    let sums = warm.sums.clone();
    assert_eq!(warm.read_all(), sums);
    warm.reboot();
    is_warm(&mut warm, 1);
    warm.lab.dewar(&["freeze", "g"]).done();
    wait_until("the end of ours", Duration::from_secs(20), || {
        ours(&warm.lab, "__disks").is_empty() && ours(&warm.lab, "__disk-server").is_empty()
    });
    // Nobody has its lock now. Who writes it is noticed.
    let disk = File::options().write(true).open(&warm.disk).expect("disk");
    let written = disk.metadata().and_then(|it| it.modified()).expect("time");
    disk.set_modified(written + Duration::from_secs(1)).expect("time");
    warm.lab.dewar(&["thaw", "g"]).failed(1, &["was written while"]);
    disk.set_modified(written).expect("time");
    // What is wanted of a frozen guest's disk holds from the thaw on.
    warm.lab.dewar(&["cache", "g", "off"]).done();
    warm.lab.dewar(&["thaw", "g"]).done();
    warm.is_again();
    assert_eq!(warm.read_all(), sums);
    let held = warm.told()["last_reset"]["held"].clone();
    warm.reboot();
    assert_eq!(warm.read_all(), sums);
    assert_eq!(warm.told()["last_reset"]["held"], held, "nobody holds it for a cache that is off");
}

#[test]
#[ignore = "long: make test-long"]
fn what_the_user_says_of_resets_is_done_and_a_command_at_work_is_not_disturbed() {
    let mut warm = Warm::new("cache=warm,cache-size=16M");
    warm.reboot();
    let found = warm.searched(1);
    assert_eq!(found["search"]["kept"], 4096, "{found}");
    assert!(found["search"]["too_many"].as_u64() > Some(7000), "{found}");
    let sums = warm.sums.clone();
    assert_eq!(warm.read_all(), sums);
    // Who has the guest's lock has its memory in hand.
    std::thread::sleep(Duration::from_secs(4));
    let lock = File::open(warm.lab.root().join("guests/g/lock")).expect("lock");
    flock(&lock, FlockOperation::LockExclusive).expect("lock");
    warm.reboot();
    drop(lock);
    wait_until("the reset to be told", Duration::from_secs(10), || {
        let told = warm.told();
        told["last_reset"]["held"] == 2 && told["last_reset"]["cold"].is_string()
    });
    assert_eq!(warm.read_all(), sums);

    let lab = common::lab();
    let disk = make_disk(&lab);
    let spec = GuestSpec {
        disks: Vec::new(),
        served: vec![format!("{},cache=warm", disk.display())],
        extra: vec!["-no-reboot".to_owned()],
        ..GuestSpec::default()
    };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.send("spawn reboot -f").expect("reboot");
    wait_until("the end", Duration::from_secs(20), || {
        lab.ps("g").is_some_and(|it| it["state"] == "ended")
            && ours(&lab, "__disks").is_empty()
            && ours(&lab, "__disk-server").is_empty()
    });
}

#[test]
#[ignore = "long: make test-long"]
fn the_cache_is_switched_on_and_off_while_the_guest_runs() {
    let mut warm = Warm::new("cache=off");
    let sums = warm.sums.clone();
    let on = ["cache", "g", "on", "--size", "100M"];
    let told = warm.lab.dewar(&on).done().json();
    assert_eq!(told["disks"][0]["cache_bytes"], 100 << 20, "{told}");
    // What it has in memory already was read before.
    warm.ask("append /proc/sys/vm/drop_caches 3");
    assert_eq!(warm.read_all(), sums);
    warm.reboot();
    is_warm(&mut warm, 1);
    warm.lab.dewar(&["cache", "g", "off", "--disk", "disk0"]).done();
    warm.reboot();
    assert_eq!(warm.read_all(), sums);
    assert_eq!(warm.told()["last_reset"]["held"], 1, "nobody holds it");
    warm.lab.dewar(&["cache", "g", "on", "--disk", "other"]).failed(2, &["it has disk0"]);
    // Held for a cache that is not wanted any more when it resets: it goes on.
    warm.lab.dewar(&on).done();
    std::thread::sleep(Duration::from_millis(500));
    warm.lab.dewar(&["cache", "g", "off"]).done();
    warm.reboot();
    assert_eq!(warm.read_all(), sums);
    let mut poweroff = warm.guest;
    poweroff.console.send("spawn poweroff -f").expect("poweroff");
    wait_until("the end", Duration::from_secs(20), || {
        warm.lab.ps("g").is_some_and(|it| it["state"] == "ended")
    });
    let spec = GuestSpec::default();
    warm.lab.run("plain", &spec).expect("guest");
    warm.lab.dewar(&["cache", "plain", "on"]).failed(4, &["no disk that Dewar serves"]);
}

#[test]
#[ignore = "long: make test-long"]
fn disks_of_any_kind_are_served_and_what_cannot_be_leaves_nothing() {
    let lab = common::lab();
    let (raw, qcow2) = (make_disk(&lab), lab.path().join("second.qcow2"));
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-q", "-O", "qcow2"]).args([&raw, &qcow2]);
    assert!(command.status().expect("qemu-img").success());
    let served = vec![
        format!("{},format=qcow2,cache=warm", qcow2.display()),
        format!("{},readonly,id=second", raw.display()),
    ];
    let spec = GuestSpec { disks: Vec::new(), served, ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    let mut ask = |command: &str| guest.console.ask(command).expect(command);
    ask("run mount -t ext4 /dev/vda /mnt");
    ask("run mkdir /second");
    ask("run mount -o ro,noload -t ext4 /dev/vdb /second");
    let sum = ask("sum /mnt/file0");
    let of = |told: &str| told.rsplit_once(' ').expect("three words").0.to_owned();
    assert_eq!(of(&sum), of(&ask("sum /second/file0")));
    ask("run dd if=/dev/zero of=/mnt/written bs=64k count=16 conv=fsync");
    assert!(guest.console.ask("run dd if=/dev/zero of=/dev/vdb bs=4k count=1 conv=fsync").is_err());
    // A disk that is in use, none, one twice, and an option that is none.
    let run = |disks: &[String]| {
        let mut words = vec!["run", "h"];
        words.extend(disks.iter().flat_map(|disk| ["--disk", disk]));
        words.extend(["--", "qemu-system-x86_64", "-display", "none"]);
        lab.dewar(&words)
    };
    let raw = raw.display().to_string();
    run(&[qcow2.display().to_string()]).failed(1, &["in use by another program"]);
    run(&["/nowhere".to_owned()]).failed(2, &["No such file"]);
    run(&[format!("{raw},readonly"), format!("{raw},readonly,id=x")])
        .failed(2, &["another has its path"]);
    run(&[format!("{raw},cache=hot")]).failed(2, &["'cache=hot' is not understood"]);
    let odd = lab.path().join("odd");
    std::fs::write(&odd, "x").expect("file");
    run(&[odd.display().to_string()]).failed(1, &["no multiple of 512"]);
    assert!(lab.ps("h").is_none() && lab.ram_files("h").is_empty());
    wait_until("nobody to serve it", Duration::from_secs(20), || {
        ours(&lab, "__disks").len() == 1 && ours(&lab, "__disk-server").len() == 1
    });
}

#[test]
fn a_guest_reboots_warm_under_kvm() {
    if GuestSpec::default().accel != "kvm" {
        println!("SKIPPED a_guest_reboots_warm_under_kvm: it runs in 'make test-kvm'");
        return;
    }
    let mut warm = Warm::new("cache=warm");
    for held in [1, 2] {
        warm.reboot();
        is_warm(&mut warm, held);
        std::thread::sleep(Duration::from_secs(4));
    }
    assert_exact(&warm.lab, &mut warm.guest, "after two reboots");
}
