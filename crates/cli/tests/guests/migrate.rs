//! Guests that move to another host and back.

use crate::common;
use dewar_testkit::{Console, GuestSpec, Lab, Ran, TestGuest};

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

    /// The command line that moves the guest from one host to another.
    fn line(from: &Lab, to: &Lab, more: &[&str]) -> Vec<String> {
        let _ = from;
        let (via, root) = (to.via(), to.root().display().to_string());
        let program = to.program().display().to_string();
        let fixed = ["migrate", "g", "--via", &via, "--remote-root", &root, "--remote-dewar", &program];
        fixed.iter().chain(more).map(|word| (*word).to_owned()).collect()
    }

    fn migrate(from: &Lab, to: &Lab, more: &[&str]) -> Ran {
        let line = Self::line(from, to, more);
        from.dewar(&line.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Connects to the guest where it runs now.
    fn reach(&mut self, at_b: bool) {
        let lab = if at_b { &self.b } else { &self.a };
        self.guest.folder = lab.guest_folder("g").expect("folder");
        self.guest.console =
            Console::connect(&self.guest.folder.join("console")).expect("console");
    }
}

#[test]
fn a_guest_moves_there_and_back() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    for round in 0..2 {
        let moved = Hosts::migrate(&hosts.a, &hosts.b, &["--max-downtime", "1s"]).done();
        println!("round {round}: {}", moved.stdout.trim());
        assert!(hosts.a.ps("g").is_none(), "round {round}");
        assert_eq!(hosts.b.ps("g").expect("listed")["state"], "running");
        hosts.reach(true);
        hosts.guest.console.ask("verify").expect("all pages are right there");
        let moved = Hosts::migrate(&hosts.b, &hosts.a, &["--max-downtime", "1s"]).done();
        println!("round {round}, back: {}", moved.stdout.trim());
        assert!(hosts.b.ps("g").is_none(), "round {round}");
        hosts.reach(false);
        hosts.guest.console.ask("verify").expect("all pages are right here");
    }
}
