//! Guests that move to another host and back.

use crate::common;
use dewar_testkit::{Console, GuestSpec, Lab, Ran, TestGuest, wait_until};
use std::time::Duration;

/// Two hosts, and a guest on the first.
pub(crate) struct Hosts {
    pub a: Lab,
    pub b: Lab,
    pub guest: TestGuest,
}

impl Hosts {
    fn new(spec: &GuestSpec) -> Self {
        let a = common::lab();
        let guest = a.run("g", spec).expect("guest");
        let b = a.other_host(&["g"]).expect("second host");
        Self { a, b, guest }
    }

    /// The command line that moves the guest to a host.
    fn line(to: &Lab, more: &[&str]) -> Vec<String> {
        let (via, root) = (to.via(), to.root().display().to_string());
        let program = to.program().display().to_string();
        let fixed =
            ["migrate", "g", "--via", &via, "--remote-root", &root, "--remote-dewar", &program];
        fixed.iter().chain(more).map(|word| (*word).to_owned()).collect()
    }

    fn migrate(from: &Lab, to: &Lab, more: &[&str]) -> Ran {
        let line = Self::line(to, more);
        from.dewar(&line.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Connects to the guest where it runs now.
    fn reach(&mut self, at_b: bool) {
        let lab = if at_b { &self.b } else { &self.a };
        self.guest.folder = lab.guest_folder("g").expect("folder");
        self.guest.console = Console::connect(&self.guest.folder.join("console")).expect("console");
    }

    /// Where the guest is: what both hosts tell of it.
    fn states(&self) -> [String; 2] {
        [&self.a, &self.b].map(|lab| {
            let told = lab.ps("g").map(|it| it["state"].as_str().unwrap_or("?").to_owned());
            told.unwrap_or_else(|| "-".to_owned())
        })
    }

    /// Waits until no command works on the guest any more.
    fn quiet_states(&self, after: &str) -> [String; 2] {
        let mut states = self.states();
        wait_until(after, Duration::from_secs(60), || {
            states = self.states();
            !states.iter().any(|state| state == "busy")
        });
        states
    }

    /// That the guest runs on one host, is known on no other, and has every page right. Says whether it is
    /// on the second.
    fn assert_on_one(&mut self, after: &str) -> bool {
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
    fn killed_at(&self, step: &str) -> Ran {
        let line = Self::line(&self.b, &["--max-downtime", "1s"]);
        let mut command = self.a.command(&line.iter().map(String::as_str).collect::<Vec<_>>());
        let output = command.env("DEWAR_TEST_SIGNAL", format!("{step}:kill")).output();
        Ran::of(&output.expect("dewar"))
    }

    /// Brings the guest back to A.
    fn bring_back(&mut self, after: &str) {
        if self.assert_on_one(after) {
            Self::migrate(&self.b, &self.a, &["--max-downtime", "1s"]).done();
            assert!(!self.assert_on_one(after), "{after}: it is back");
        }
    }
}

#[test]
fn a_guest_moves_there_and_back() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    for round in 0..2 {
        let moved = Hosts::migrate(&hosts.a, &hosts.b, &["--max-downtime", "1s"]).done();
        println!("round {round}: {}", moved.stdout.trim());
        assert!(hosts.assert_on_one(&format!("round {round}")));
        hosts.bring_back(&format!("round {round}, back"));
    }
}

/// Each of the two commands is killed at each of its steps: the guest runs on one host, or on none
/// until the source asks.
#[test]
fn killed_at_every_step_it_runs_on_one_host() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    // The step, whether it is the source's, and how the guest is on both hosts then.
    let given = ["given away", "arriving"];
    let stays = ["running", "-"];
    for (step, code, states) in [
        ("guarded", -1, stays),
        ("sending memory", -1, stays),
        ("flushed", -1, stays),
        ("intent", -1, stays),
        // Its last pages may be on their way, or not.
        ("sent", -1, ["running", "-"]),
        ("given", -1, given),
        ("gone", -1, ["-", "running"]),
        ("ended", -1, ["-", "running"]),
        ("starting QEMU", 1, stays),
        ("receiving memory", 1, stays),
        ("loading the devices", 1, stays),
        ("loaded", 1, ["running", "arriving"]),
        ("owned", 5, ["given away", "running"]),
        ("committed", 5, ["given away", "running"]),
        ("let run", 5, ["given away", "running"]),
        ("running", 5, ["given away", "running"]),
    ] {
        let after = format!("killed at '{step}'");
        let ran = hosts.killed_at(step);
        assert_eq!(ran.code, code, "{after}: {}", ran.stderr);
        let mut found = hosts.quiet_states(&after);
        if step == "sent" && found[1] == "arriving" {
            hosts.b.dewar(&["migrate", "g", "--abort"]).done();
            found = hosts.quiet_states(&after);
        }
        assert_eq!(found, states.map(str::to_owned), "{after}: {}", ran.stderr);
        if found[0] == "given away" {
            hosts.a.dewar(&["migrate", "g", "--resume"]).done();
        } else if found[1] == "arriving" {
            // Its source has forgotten it; what it offers anew takes its place.
            Hosts::migrate(&hosts.a, &hosts.b, &["--max-downtime", "1s"]).done();
        }
        hosts.bring_back(&after);
    }
}
