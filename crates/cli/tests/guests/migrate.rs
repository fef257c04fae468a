//! Guests that move to another host and back.

use crate::common::{self, HeldCheckpoint};
use dewar_guest_qemu::Qmp;
use dewar_testkit::{
    Console, GuestSpec, Lab, Ran, TestGuest, kill, sample, signal_stop, wait_until,
};
use rustix::process::Signal;
use std::process::{Child, Stdio};
use std::time::Duration;

/// Two hosts, and a guest on the first.
pub(crate) struct Hosts {
    pub a: Lab,
    pub b: Lab,
    pub guest: TestGuest,
}

impl Hosts {
    pub(crate) fn new(spec: &GuestSpec) -> Self {
        Self::with(common::lab().as_host().expect("first host"), spec)
    }

    /// The same with a first host that is there.
    pub(crate) fn with(a: Lab, spec: &GuestSpec) -> Self {
        let guest = a.run("g", spec).expect("guest");
        let b = a.second_host(&["g"]).expect("second host");
        Self { a, b, guest }
    }

    /// The command line that moves the guest to a host.
    pub(crate) fn line(to: &Lab, more: &[&str]) -> Vec<String> {
        Self::line_via(&to.via(), to, more)
    }

    /// The same over a connection of one's own.
    pub(crate) fn line_via(via: &str, to: &Lab, more: &[&str]) -> Vec<String> {
        Self::line_of("g", via, to, more)
    }

    /// The same for a guest of any name.
    pub(crate) fn line_of(guest: &str, via: &str, to: &Lab, more: &[&str]) -> Vec<String> {
        let root = to.root().display().to_string();
        let program = to.program().display().to_string();
        let fixed =
            ["migrate", guest, "--via", via, "--remote-root", &root, "--remote-dewar", &program];
        fixed.iter().chain(more).map(|word| (*word).to_owned()).collect()
    }

    pub(crate) fn migrate(from: &Lab, to: &Lab, more: &[&str]) -> Ran {
        from.dewar(&words(&Self::line(to, more)))
    }

    /// A migration from A to B that stands still at a step of the destination's.
    pub(crate) fn held_there(&self, step: &str, line: &[String]) -> HeldThere {
        let mut command = self.a.command(&words(line));
        command.env("DEWAR_TEST_SIGNAL", format!("{step}:stop"));
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("dewar");
        let mut there = None;
        wait_until(&format!("step '{step}'"), Duration::from_secs(60), || {
            there = common::started(command.id() as i32, "receive").filter(|pid| signal_stop(*pid));
            there.is_some()
        });
        HeldThere { command, there: there.expect("it stands there") }
    }

    /// The process of the guest's QEMU on a host, whatever any command thinks of it.
    pub(crate) fn qemu_of(lab: &Lab) -> i32 {
        lab.pid_on_record("g", "process")
    }

    /// Connects to the guest where it runs now.
    pub(crate) fn reach(&mut self, at_b: bool) {
        let lab = if at_b { &self.b } else { &self.a };
        self.guest.folder = lab.guest_folder("g").expect("folder");
        self.guest.console = Console::connect(&self.guest.folder.join("console")).expect("console");
    }

    /// What is on disk of migrations.
    pub(crate) fn records(&self) -> Vec<std::path::PathBuf> {
        [&self.a, &self.b]
            .iter()
            .flat_map(|lab| common::files(&lab.root().join("migrations")))
            .collect()
    }

    /// Where the guest is: what both hosts tell of it.
    pub(crate) fn states(&self) -> [String; 2] {
        [&self.a, &self.b].map(|lab| {
            let told = lab.ps("g").map(|it| it["state"].as_str().unwrap_or("?").to_owned());
            told.unwrap_or_else(|| "-".to_owned())
        })
    }

    /// Waits until no command works on the guest any more.
    pub(crate) fn quiet_states(&self, after: &str) -> [String; 2] {
        let mut states = self.states();
        wait_until(after, Duration::from_secs(60), || {
            states = self.states();
            !states.iter().any(|state| state == "busy")
        });
        states
    }

    /// That the guest runs on one host, is known on no other, and has every page right. Says whether it is
    /// on the second.
    pub(crate) fn assert_on_one(&mut self, after: &str) -> bool {
        let states = self.quiet_states(after);
        let at_b = match states.each_ref().map(String::as_str) {
            ["running", "-"] => false,
            ["-", "running"] => true,
            _ => panic!("{after}: {states:?}"),
        };
        self.reach(at_b);
        self.guest.console.ask("verify").unwrap_or_else(|error| panic!("{after}: {error}"));
        let qemus = common::qemus(&self.a);
        assert_eq!(qemus.len(), 1, "{after}: {qemus:?}");
        at_b
    }

    /// Moves the guest from A to B, one of the commands being killed at a step.
    pub(crate) fn killed_at(&self, step: &str, more: &[&str]) -> Ran {
        self.line_killed_at(step, &Self::line(&self.b, &[more, &["--max-downtime", "1s"]].concat()))
    }

    /// The same with a command line of one's own.
    pub(crate) fn line_killed_at(&self, step: &str, line: &[String]) -> Ran {
        let mut command = self.a.command(&words(line));
        let output = command.env("DEWAR_TEST_SIGNAL", format!("{step}:kill")).output();
        Ran::of(&output.expect("dewar"))
    }

    /// The same, with this exit code; how the guest is on both hosts then is looked at. Then it is brought to
    /// its end, and the guest back to A.
    pub(crate) fn killed_and_back(
        &mut self,
        step: &str,
        line: &[String],
        code: i32,
        is_as_it_should: &dyn Fn(&[String; 2]) -> bool,
    ) {
        let after = format!("killed at '{step}'");
        let ran = self.line_killed_at(step, line);
        assert_eq!(ran.code, code, "{after}: {}", ran.stderr);
        let mut found = self.quiet_states(&after);
        if step == "sent" && found[1] == "arriving" {
            self.b.dewar(&["migrate", "g", "--abort"]).done();
            found = self.quiet_states(&after);
        }
        assert!(is_as_it_should(&found), "{after}: {found:?}, {}", ran.stderr);
        if found[0] == "given away" {
            self.a.dewar(&["migrate", "g", "--resume"]).done();
        } else if found[1] == "arriving" {
            // Its source has forgotten it; what it offers anew takes its place.
            Self::migrate(&self.a, &self.b, &["--max-downtime", "1s"]).done();
        }
        self.bring_back(&after);
    }

    /// Brings the guest back to A.
    pub(crate) fn bring_back(&mut self, after: &str) {
        if self.assert_on_one(after) {
            Self::migrate(&self.b, &self.a, &["--max-downtime", "1s"]).done();
            assert!(!self.assert_on_one(after), "{after}: it is back");
        }
    }
}

pub(crate) fn words(line: &[String]) -> Vec<&str> {
    line.iter().map(String::as_str).collect()
}

/// A migration whose destination stands still.
pub(crate) struct HeldThere {
    pub command: Child,
    there: i32,
}

impl HeldThere {
    pub(crate) fn go_on(self) -> Ran {
        kill(self.there, Signal::CONT);
        Ran::of(&self.command.wait_with_output().expect("wait"))
    }
}

/// Ends the programs through which a command's connection goes.
pub(crate) fn cut_link(command: i32) {
    let links = common::children(command).into_iter().flat_map(common::children);
    let is_link = |pid: &i32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "cat")
    };
    let links: Vec<i32> = links.filter(is_link).collect();
    assert_eq!(links.len(), 2, "a link each way");
    links.into_iter().for_each(end);
}

/// Ends a process that is not ours to wait for.
pub(crate) fn end(pid: i32) {
    kill(pid, Signal::KILL);
    dewar_testkit::wait_while_alive(pid);
}

#[test]
fn a_guest_moves_there_and_back() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    // By TLS, and by the tunnel that everything else takes.
    let address = hosts.b.address();
    let report = hosts.a.path().join("report.html").display().to_string();
    for (round, way) in [["--address", &address], ["--codec", "zstd"]].into_iter().enumerate() {
        let more = [&way[..], &["--max-downtime", "1s", "--report", &report]].concat();
        let moved = Hosts::migrate(&hosts.a, &hosts.b, &more).done();
        println!("round {round}: {}", moved.stdout.trim());
        let html = std::fs::read_to_string(&report).expect("report");
        for seen in ["it stands still: ", "by themselves: ", "epoch 1: "] {
            assert!(html.contains(seen), "{seen}");
        }
        assert!(hosts.assert_on_one(&format!("round {round}")));
        hosts.bring_back(&format!("round {round}, back"));
    }
    assert_eq!(hosts.records(), Vec::<std::path::PathBuf>::new(), "nothing is to be remembered");
}

/// Each of the two commands is killed at each of its steps: the guest runs on one host, or on none
/// until the source asks.
#[test]
fn killed_at_every_step_it_runs_on_one_host() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    // The step, whether it is the source's, and how the guest is on both hosts then.
    let given = ["given away", "arriving"];
    let arrived = ["given away", "running"];
    let stays = ["running", "-"];
    let line = Hosts::line(&hosts.b, &["--max-downtime", "1s"]);
    // Where some are tried, those of the first column.
    let all = [
        [("guarded", -1, stays), ("sending memory", -1, stays)],
        [("intent", -1, stays), ("flushed", -1, stays)],
        // Its last pages may be on their way, or not.
        [("sent", -1, stays), ("ended", -1, ["-", "running"])],
        [("given", -1, given), ("starting QEMU", 1, stays)],
        [("gone", -1, ["-", "running"]), ("receiving memory", 1, stays)],
        [("loaded", 1, ["running", "arriving"]), ("loading the devices", 1, stays)],
        [("committed", 5, arrived), ("owned", 5, arrived)],
        [("let run", 5, arrived), ("running", 5, arrived)],
    ];
    for (step, code, states) in sample("steps of a move", all.concat(), 8) {
        hosts.killed_and_back(step, &line, code, &|found| found == &states.map(str::to_owned));
    }
}

/// The connection is cut while one of the two commands stands at a step, which then goes on.
#[test]
fn a_link_that_is_cut_leaves_it_on_one_host() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    // A link that can be cut, with ends that are alive.
    let via = format!("sh -c 'cat | \"$@\" | cat' sh {}", hosts.b.via());
    let line = Hosts::line_via(&via, &hosts.b, &["--max-downtime", "1s"]);
    let all = vec![
        ("sending changes", true, 1, ["running", "-"]),
        ("intent", true, 1, ["running", "-"]),
        ("given", true, 5, ["given away", "arriving"]),
        ("receiving memory", false, 1, ["running", "-"]),
        ("loaded", false, 1, ["running", "arriving"]),
        ("owned", false, 5, ["given away", "running"]),
        ("running", false, 5, ["given away", "running"]),
    ];
    for (step, is_here, code, states) in sample("steps at which the link is cut", all, 4) {
        let after = format!("the link is cut at '{step}'");
        let ran = if is_here {
            let held = HeldCheckpoint::at_with(&hosts.a, &words(&line), step);
            cut_link(held.pid);
            let (code, stdout, stderr) = held.go_on();
            Ran { code, stdout, stderr }
        } else {
            let held = hosts.held_there(step, &line);
            cut_link(held.command.id() as i32);
            held.go_on()
        };
        assert_eq!(ran.code, code, "{after}: {}", ran.stderr);
        let found = hosts.quiet_states(&after);
        assert_eq!(found, states.map(str::to_owned), "{after}: {}", ran.stderr);
        match found.each_ref().map(String::as_str) {
            // Nobody can have it back now, or a person asks for it.
            ["given away", "arriving"] => {
                hosts.a.dewar(&["stop", "g", "--now"]).failed(1, &["given to another host"]);
                hosts.b.dewar(&["stop", "g", "--now"]).failed(1, &["another host's"]);
                hosts.b.dewar(&["migrate", "g", "--abort"]).done();
                hosts.a.dewar(&["migrate", "g", "--take-back"]).done();
            }
            ["running", "arriving"] => {
                hosts.b.dewar(&["migrate", "g", "--abort"]).done();
            }
            ["given away", _] => {
                hosts.a.dewar(&["migrate", "g", "--resume"]).done();
            }
            _ => {}
        }
        hosts.bring_back(&after);
    }
}

/// A guest that runs at the other host, or may, is not let run here for what some other place knows nothing of.
#[test]
fn what_may_run_there_is_not_let_run_here() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    let line = Hosts::line(&hosts.b, &["--max-downtime", "1s"]);
    assert_eq!(hosts.line_killed_at("given", &line).code, -1);
    assert_eq!(hosts.quiet_states("given"), ["given away", "arriving"].map(str::to_owned));
    // Another root folder is reached there now.
    let (root, away) = (hosts.b.root().to_owned(), hosts.b.path().join("away"));
    std::fs::rename(&root, &away).expect("rename");
    for ending in ["--resume", "--abort"] {
        hosts.a.dewar(&["migrate", "g", ending]).failed(5, &["no migration of 'g' is known"]);
    }
    let _ = std::fs::remove_dir_all(&root);
    std::fs::rename(&away, &root).expect("rename");
    assert_eq!(hosts.states(), ["given away", "arriving"].map(str::to_owned));
    hosts.a.dewar(&["migrate", "g", "--resume"]).done();
    hosts.bring_back("asked at the right place");
    // What is left here of one that runs there.
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line), "gone");
    end(held.guardian().expect("a guardian"));
    held.kill();
    hosts.a.dewar(&["migrate", "g", "--take-back"]).failed(1, &["'g' runs at"]);
    assert!(hosts.assert_on_one("it is gone"));
}

/// A QEMU that ends leaves the guest in the other one, if that has all of it.
#[test]
#[ignore = "long: make test-long"]
fn a_qemu_that_ends_takes_no_guest_with_it_that_the_other_has() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    let line = Hosts::line(&hosts.b, &["--max-downtime", "1s"]);
    // The one that waits at B, while memory is sent, and when all is loaded.
    for step in ["receiving memory", "loading the devices"] {
        let held = hosts.held_there(step, &line);
        end(Hosts::qemu_of(&hosts.b));
        held.go_on().failed(1, &["the guest is running"]);
        assert!(!hosts.assert_on_one(step));
    }
    // It ended when it had been given the guest: whether it ran there nobody knows.
    let held = hosts.held_there("owned", &line);
    end(Hosts::qemu_of(&hosts.b));
    held.go_on().failed(5, &["--take-back"]);
    assert_eq!(hosts.quiet_states("owned"), ["given away", "arriving"].map(str::to_owned));
    for ending in ["--resume", "--abort"] {
        hosts.a.dewar(&["migrate", "g", ending]).failed(5, &["not known whether"]);
    }
    hosts.b.dewar(&["migrate", "g", "--abort"]).failed(1, &["cannot be refused"]);
    hosts.b.dewar(&["rm", "g", "--force"]).done();
    hosts.a.dewar(&["migrate", "g", "--take-back"]).done();
    assert!(!hosts.assert_on_one("taken back"));
    // The one that it leaves.
    let held = HeldCheckpoint::at_with(&hosts.a, &words(&line), "sending changes");
    end(Hosts::qemu_of(&hosts.a));
    let (code, _, said) = held.go_on();
    assert_eq!(code, 5, "{said}");
    assert_eq!(hosts.quiet_states("the source's"), ["ended", "-"].map(str::to_owned));
}

/// What cannot move is refused before anything is touched.
#[test]
#[ignore = "long: make test-long"]
fn what_cannot_move_stays_as_it_is() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    let refused = |hosts: &Hosts, code: i32, said: &[&str], more: &[&str]| {
        Hosts::migrate(&hosts.a, &hosts.b, more).failed(code, said);
        assert_eq!(hosts.states(), ["running", "-"].map(str::to_owned), "{said:?}");
    };
    // Nobody is there, or it is no dewar, or it is one that says what is none of the protocol.
    let liar = "sh -c 'head -c 4000 /dev/urandom; cat > /dev/null' sh";
    for via in ["false", "/nonexistent/program", liar] {
        let line = Hosts::line_via(via, &hosts.b, &[]);
        hosts.a.dewar(&words(&line)).failed(1, &["cannot be reached", "not touched"]);
    }
    // The other host does not listen at that address.
    let more = ["--address", "127.0.0.1"];
    refused(&hosts, 1, &["no direct connection to 127.0.0.1", "'--tunnel'", "not touched"], &more);
    // A report that cannot be written.
    refused(&hosts, 1, &["cannot write", "No such file"], &["--report", "/nowhere/report.html"]);
    // No pause is that short.
    let report = hosts.a.path().join("report.html");
    let more = ["--max-downtime", "1ms", "--report", &report.display().to_string()];
    refused(&hosts, 1, &["writes faster than", "'--max-downtime", "the guest is running"], &more);
    assert!(!report.exists(), "there is nothing to draw");
    // Its disk is not there.
    let disk = hosts.b.guest_folder("g").expect("folder").join("disk0.qcow2");
    let away = disk.with_extension("away");
    std::fs::rename(&disk, &away).expect("rename");
    refused(&hosts, 4, &["its disk", "is not on this host", "shared storage"], &[]);
    std::fs::copy(&away, &disk).expect("copy");
    refused(&hosts, 4, &["its disk", "is another file", "shared storage"], &[]);
    std::fs::rename(&away, &disk).expect("rename");
    // A destination that hears what is none of the protocol, or nothing.
    for input in ["/dev/urandom", "/dev/null"] {
        let input = std::fs::File::open(input).expect("input");
        let mut receive = hosts.b.command(&["receive"]);
        Ran::of(&receive.stdin(input).output().expect("dewar")).failed(1, &[]);
    }
    // The name is taken.
    let folder = hosts.b.root().join("guests/g");
    std::fs::create_dir_all(&folder).expect("folder");
    let record = hosts.a.root().join("guests/g/guest.json");
    std::fs::copy(record, folder.join("guest.json")).expect("copy");
    Hosts::migrate(&hosts.a, &hosts.b, &[]).failed(4, &["there is a guest 'g' already"]);
    std::fs::remove_dir_all(&folder).expect("remove");
    assert!(!hosts.assert_on_one("refused all the time"));
    assert_eq!(hosts.records(), Vec::<std::path::PathBuf>::new(), "nothing is to be remembered");
    // Its disk is an overlay of this host's.
    hosts.a.dewar(&["checkpoint", "g"]).done();
    hosts.a.restore(&mut hosts.guest, &["g", "--replace"]).expect("restore");
    hosts.a.wait_for_memory("g");
    refused(&hosts, 4, &["lies in its folder on this host"], &[]);
}

/// A guest that stands still moves and goes on standing still; its chain of checkpoints goes on in a store
/// that both hosts have.
#[test]
#[ignore = "long: make test-long"]
fn how_it_stands_and_its_checkpoints_move_along() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    let store = hosts.a.store().display().to_string();
    hosts.a.dewar(&["checkpoint", "g", "--store", &store]).done();
    let record = hosts.a.root().join("guests/g/qmp.sock");
    let mut qmp = Qmp::connect(&record).expect("QMP");
    qmp.execute("stop", serde_json::json!({})).expect("stop");
    drop(qmp);
    Hosts::migrate(&hosts.a, &hosts.b, &[]).done();
    assert_eq!(hosts.states(), ["-", "paused"].map(str::to_owned));
    // QEMU must have its disks to save it.
    hosts.b.dewar(&["checkpoint", "g", "--store", &store]).done();
    assert_eq!(hosts.states(), ["-", "paused"].map(str::to_owned));
    let mut qmp = Qmp::connect(&hosts.b.root().join("guests/g/qmp.sock")).expect("QMP");
    qmp.execute("cont", serde_json::json!({})).expect("cont");
    drop(qmp);
    assert!(hosts.assert_on_one("let run there"));
    let told = hosts.b.dewar(&["checkpoint", "g", "--store", &store]).done().json();
    assert!(told["pages"]["unchanged"].as_u64().expect("number") > 15_000, "{told}");
    hosts.b.dewar(&["verify", "g", "--store", &store]).done();
}
