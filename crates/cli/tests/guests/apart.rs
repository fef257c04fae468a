//! A checkpoint takes the CPU time that nobody else wants, whatever session the guest is in.

use crate::common::{self, HeldCheckpoint, started};
use dewar_testkit::{GuestSpec, Lab, TestGuest, is_alive, kill, wait_until, wait_while_alive};
use rustix::process::Signal;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;

/// The weight of a process's session, as a nice value.
fn weight(pid: i32) -> Option<i32> {
    let told = std::fs::read_to_string(format!("/proc/{pid}/autogroup")).ok()?;
    told.split_whitespace().last()?.parse().ok()
}

/// Whether sessions have weights here, and we may set ours; says so if not.
fn have_sessions_weights(test: &str) -> bool {
    const SYS_ADMIN: u32 = 21;
    let setting = std::fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled");
    let enabled = setting.is_ok_and(|setting| setting.trim() == "1");
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let rights = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("rights");
    let rights = u64::from_str_radix(rights.trim(), 16).expect("hexadecimal");
    let have = enabled && rights & (1 << SYS_ADMIN) != 0;
    if !have {
        println!("SKIPPED {test}: sessions have no weights here that we may set");
    }
    have
}

fn guest(lab: &Lab) -> TestGuest {
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    guest.console.ask("fill 64 noise").expect("fill");
    guest.console.ask("check 2000 1 disk").expect("check");
    guest
}

#[test]
#[ignore = "long: make test-long"]
fn its_session_weighs_little_but_in_the_pause() {
    if !have_sessions_weights("its_session_weighs_little_but_in_the_pause") {
        return;
    }
    let lab = common::lab();
    let _guest = guest(&lab);
    let (qemu, ours) = (lab.pid("g").expect("it runs"), std::process::id() as i32);
    let before = (weight(qemu), weight(ours));
    let command = lab
        .command(&["checkpoint", "g"])
        .env("DEWAR_TEST_SIGNAL", "stopped:stop")
        .env("DEWAR_TEST_PAUSE_LIMIT", "300")
        .stdout(Stdio::null())
        .spawn()
        .expect("dewar starts");
    let pid = command.id() as i32;
    let mut child = None;
    wait_until("workers in the bulk pass", Duration::from_secs(20), || {
        child = child.or_else(|| started(pid, "checkpoint"));
        // 19, and less while it gets no CPU.
        child.and_then(weight) > Some(0)
    });
    let child = child.expect("a child");
    wait_until("the pause", Duration::from_secs(60), || dewar_testkit::signal_stop(pid));
    assert_eq!(weight(child), Some(0), "in the pause it is as heavy as others");
    assert_eq!((weight(qemu), weight(ours)), before, "nobody else's weight changed");
    assert_eq!(HeldCheckpoint { child: command, pid }.go_on().0, 0);
}

#[test]
#[ignore = "long: make test-long"]
fn it_ends_as_its_child_does_and_the_child_where_it_does() {
    if !have_sessions_weights("it_ends_as_its_child_does_and_the_child_where_it_does") {
        return;
    }
    let lab = common::lab();
    let mut guest = guest(&lab);
    for step in ["bulk-done", "stopped"] {
        // Its child, killed.
        let mut held = HeldCheckpoint::at(&lab, "g", step);
        let child = held.started("checkpoint").expect("a child");
        let guardian = held.guardian().expect("a guardian");
        kill(child, Signal::KILL);
        kill(held.pid, Signal::CONT);
        let status = held.child.wait().expect("wait");
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{step}: {status}");
        wait_while_alive(guardian);
        guest.console.ask("count").expect("the guest goes on");

        // Itself, killed; nobody stops the child from ending.
        let held = HeldCheckpoint::at(&lab, "g", step);
        let child = held.started("checkpoint").expect("a child");
        let guardian = held.guardian().expect("a guardian");
        assert!(is_alive(child));
        held.kill();
        wait_while_alive(child);
        wait_while_alive(guardian);
        guest.console.ask("count").expect("the guest goes on");
    }
    // A failure has its exit code and its one object.
    lab.dewar(&["checkpoint", "nobody"]).failed(3, &["nobody"]);
}
