//! Guests that run at another host before all of their memory is there.

use crate::common::{self, HeldCheckpoint};
use crate::migrate::{Hosts, end, words};
use dewar_testkit::{GuestSpec, kill, sample, wait_until};
use rustix::process::Signal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A guest that writes to ten thousand pages, beside memory that stands still.
fn hosts() -> Hosts {
    let mut hosts = Hosts::new(&GuestSpec { memory_mib: 256, ..GuestSpec::default() });
    hosts.guest.console.ask("fill 64 noise").expect("fill");
    hosts.guest.console.ask("check 10000 1 disk").expect("check");
    hosts
}

/// The command line of a post-copy from A to B over a link of so many Mbit/s, which ends when its program
/// is killed.
fn line(hosts: &Hosts, mbit: u32) -> Vec<String> {
    let link = hosts.a.program().with_file_name("dewar-link");
    let via = format!("{} {mbit} 0 {}", link.display(), hosts.b.via());
    let more = ["--postcopy", "--tunnel", "--max-downtime", "1s", "--codec", "raw"];
    Hosts::line_via(&via, &hosts.b, &more)
}

/// The same of a guest that has little else than what is always on its way.
fn line_of_little(hosts: &Hosts) -> Vec<String> {
    let mut line = line(hosts, 300);
    line.truncate(line.len() - 2);
    line
}

/// How far the memory of the guest at B is.
fn memory_at_b(hosts: &Hosts) -> serde_json::Value {
    hosts.b.ps("g").expect("listed")["lazy_restore"].clone()
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_runs_before_its_memory_is_there() {
    let mut hosts = hosts();
    let address = hosts.b.address();
    for (round, way) in [&["--tunnel"][..], &["--address", &address]].into_iter().enumerate() {
        let more = [way, &["--postcopy", "--max-downtime", "1s"]].concat();
        let moved = Hosts::migrate(&hosts.a, &hosts.b, &more).done();
        println!("round {round}: {}", moved.stdout.trim());
        let late = moved.json()["post_copy_pages"].as_u64().expect("number");
        assert!(late > 100, "{late} pages came late");
        assert!(hosts.assert_on_one(&format!("round {round}")));
        // Nothing of it is owed: its memory can be captured.
        let store = hosts.b.store().display().to_string();
        hosts.b.dewar(&["checkpoint", "g", "--store", &store]).done();
        Hosts::migrate(&hosts.b, &hosts.a, &more[way.len()..]).done();
        assert!(!hosts.assert_on_one(&format!("round {round}, back")));
    }
    assert_eq!(hosts.records(), Vec::<PathBuf>::new(), "nothing is to be remembered");
}

/// A guest that writes faster than its pages are sent moves all the same, where that is allowed.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_does_not_converge_moves_by_post_copy() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 10000 1 disk hard").expect("check");
    let fast = ["--max-downtime", "1ms"];
    Hosts::migrate(&hosts.a, &hosts.b, &fast).failed(1, &["--postcopy=auto"]);
    let more = [&fast[..], &["--postcopy=auto"]].concat();
    let moved = Hosts::migrate(&hosts.a, &hosts.b, &more).done();
    assert!(moved.json()["post_copy_pages"].as_u64().expect("number") > 0, "{}", moved.stdout);
    assert!(hosts.assert_on_one("auto"));
}

/// Each of the two commands is killed at each step at which the guest lacks memory.
#[test]
#[ignore = "long: make test-long"]
fn killed_while_it_lacks_memory_it_loses_none() {
    let mut hosts = Hosts::new(&GuestSpec { memory_mib: 256, ..GuestSpec::default() });
    hosts.guest.console.ask("check 10000 1 disk").expect("check");
    // Its memory takes longer to come than what is done meanwhile.
    let line = line_of_little(&hosts);
    let given = ["given away", "running"];
    // Where some are tried, those of the first column.
    let steps = [
        [("given", -1, ["given away", "arriving"]), ("sent", -1, ["running", "-"])],
        [("serving", -1, given), ("gone", -1, ["-", "running"])],
        [("loaded", 1, ["running", "arriving"]), ("loading the devices", 1, ["running", "-"])],
        [("committed", 5, ["given away", "paused"]), ("owned", 5, ["given away", "arriving"])],
        [("runs in part", 5, given), ("let run", 5, given)],
        [("running", 5, given), ("all has come", 5, given)],
    ];
    for (step, code, states) in sample("kills in a post-copy", steps.concat(), 6) {
        hosts.killed_and_back(step, &line, code, &|found| {
            // One that waits for a page may not answer.
            found[0] == states[0]
                && (found[1] == states[1] || states == given && found[1] == "silent")
        });
    }
}

/// The connection is cut while the guest lacks memory: it waits, nothing else may touch it, and all comes
/// when the source goes on, more than once, and without its QEMU.
#[test]
fn a_guest_waits_for_memory_while_the_link_is_cut() {
    let mut hosts = hosts();
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line(&hosts, 100)), "serving");
    let link = common::children(held.pid)[0];
    end(link);
    let (code, _, said) = held.go_on();
    assert_eq!(code, 5, "{said}");
    assert!(said.contains("'dewar migrate g --resume' brings the rest"), "{said}");
    let states = hosts.quiet_states("cut");
    assert_eq!(states[0], "given away");
    assert_eq!(memory_at_b(&hosts)["complete"], false);
    wait_until("the end of what served it", Duration::from_secs(20), || {
        memory_at_b(&hosts)["server_alive"] == false
    });
    for ending in ["--abort", "--take-back"] {
        hosts.a.dewar(&["migrate", "g", ending]).failed(5, &["ran at", "--resume"]);
    }
    hosts.b.dewar(&["checkpoint", "g"]).failed(1, &["--resume' at the host that it left"]);
    // The source goes on, and is killed; its QEMU ends.
    let resume =
        HeldCheckpoint::at_with(&hosts.a, &["migrate", "g", "--resume"], "sending the rest");
    end(resume.pid);
    drop(resume);
    end(Hosts::qemu_of(&hosts.a));
    hosts.quiet_states("killed");
    hosts.a.dewar(&["migrate", "g", "--resume"]).done();
    wait_until("all of its memory", Duration::from_secs(30), || {
        memory_at_b(&hosts)["complete"] != false
    });
    assert!(hosts.assert_on_one("cut"));
    assert_eq!(hosts.records(), Vec::<PathBuf>::new(), "nothing is to be remembered");
}

/// The guest ends where it runs, while it lacks memory: the source has nothing to keep.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_ends_while_it_lacks_memory_is_not_kept_elsewhere() {
    let hosts = hosts();
    let line = line(&hosts, 200);
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line), "serving");
    end(Hosts::qemu_of(&hosts.b));
    let (code, _, said) = held.go_on();
    assert_eq!(code, 0, "{said}");
    assert_eq!(hosts.quiet_states("ended"), ["-", "ended"].map(str::to_owned));
}

/// All of a guest is at the other host, and nothing of it is left on the host that it leaves: it goes on.
#[test]
fn a_guest_goes_on_where_all_of_it_is() {
    let mut hosts = hosts();
    let ran = hosts.killed_at("given", &[]);
    assert_eq!(ran.code, -1, "{}", ran.stderr);
    assert_eq!(hosts.quiet_states("given"), ["given away", "arriving"].map(str::to_owned));
    end(Hosts::qemu_of(&hosts.a));
    for file in hosts.a.ram_files("g") {
        std::fs::remove_file(file).expect("remove");
    }
    hosts.a.dewar(&["migrate", "g", "--resume"]).done();
    assert!(hosts.assert_on_one("all of it"));
}

/// Memory that is gone is said to be, and what is left of the guest can be given up.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_whose_memory_is_lost_is_given_up() {
    let hosts = hosts();
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line(&hosts, 200)), "serving");
    end(held.pid);
    hosts.quiet_states("killed");
    // The source's QEMU lives, and its user gives it up.
    hosts.a.dewar(&["rm", "g", "--force"]).done();
    assert_eq!(hosts.quiet_states("given up")[0], "-");
    assert!(hosts.a.ram_files("g").is_empty());
    hosts.b.dewar(&["stop", "g", "--now"]).done();
    hosts.b.dewar(&["rm", "g", "--force"]).done();
    assert_eq!(hosts.states(), ["-", "-"].map(str::to_owned));
    assert_eq!(common::qemus(&hosts.a), Vec::<i32>::new());
}

/// The connection stands still without an end: it is given up, and another one goes on.
#[test]
#[ignore = "long: make test-long"]
fn a_link_that_stands_still_is_not_waited_for() {
    let mut hosts = hosts();
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line(&hosts, 200)), "serving");
    let link = common::children(held.pid)[0];
    kill(link, Signal::STOP);
    let began = Instant::now();
    let (code, _, said) = held.go_on();
    assert_eq!(code, 5, "{said}");
    assert!(began.elapsed() < Duration::from_secs(150), "{:?}", began.elapsed());
    hosts.quiet_states("stands still");
    hosts.a.dewar(&["migrate", "g", "--resume"]).done();
    assert!(hosts.assert_on_one("another link"));
}
