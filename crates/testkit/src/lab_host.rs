//! Machines of their own, which `scripts/hosts-lab.sh` makes. What fails on one of them panics: a test or a benchmark
//! has nothing else to do then.

use crate::lab::Ran;
use crate::process::{kill, patience, wait_while_alive};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

fn script() -> String {
    std::env::var("DEWAR_HOSTS_LAB").expect("this runs in the lab that scripts/hosts-lab.sh makes")
}

/// Where the disks of the hosts are, seen from outside.
pub fn lab_disks() -> PathBuf {
    let script = PathBuf::from(script());
    script.parent().and_then(Path::parent).expect("the project").join(".cache/hosts-lab/run")
}

/// A machine of the lab.
#[derive(Debug)]
pub struct LabHost {
    name: &'static str,
    /// The QEMU that is this machine.
    process: Mutex<Option<i32>>,
}

impl LabHost {
    /// The one of this name: `a`, `b`, or `s`, which has the disks that they share.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self { name, process: Mutex::new(None) }
    }

    /// How its words reach it.
    pub fn ssh(&self, words: &[&str]) -> Command {
        let mut command = Command::new(script());
        command.args(["ssh", self.name]).args(words).stdin(Stdio::null());
        command
    }

    /// What a shell there does.
    pub fn run(&self, line: &str) -> Ran {
        Ran::of(&self.ssh(&[line]).output().expect("ssh"))
    }

    /// Begins it, and leaves it running.
    pub fn start(&self, line: &str) -> Child {
        let mut command = self.ssh(&[line]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("ssh")
    }

    /// Starts the machine, with the disk that it had.
    pub fn boot(&self) {
        let mut command = Command::new(script());
        let command = command.args(["boot", self.name]).stderr(Stdio::inherit());
        let output = Ran::of(&command.output().expect("script")).done();
        *self.process() = Some(output.stdout.trim().parse().expect("its process"));
    }

    /// Takes its power away: what it had not flushed is lost.
    pub fn lose_power(&self) {
        if let Some(pid) = self.process().take() {
            kill(pid, Signal::KILL);
            wait_while_alive(pid);
        }
    }

    /// Whether it was started, and has its power.
    pub fn is_up(&self) -> bool {
        self.process().is_some()
    }

    /// Its next start is with a new disk.
    pub fn throw_disk_away(&self) {
        let _ = std::fs::remove_file(lab_disks().join(format!("{}.qcow2", self.name)));
    }

    fn process(&self) -> MutexGuard<'_, Option<i32>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it tells of a guest: its state, "-" where it does not know it.
    pub fn state(&self, guest: &str) -> String {
        let told = self.run("dewar ps --json").done().json();
        let guests = told["guests"].as_array().expect("guests").clone();
        let found = guests.iter().find(|it| it["name"] == guest);
        found.map_or("-", |it| it["state"].as_str().expect("state")).to_owned()
    }

    /// Makes `/root/held`: a dewar whose commands stand still at a step.
    pub fn make_dewar_that_stands_at(&self, step: &str) {
        let script = r#"#!/bin/sh\nDEWAR_TEST_SIGNAL=%s:stop exec dewar "$@"\n"#;
        let line = format!("printf '{script}' '{step}' > /root/held; chmod +x /root/held; sync");
        self.run(&line).done();
    }

    /// Waits until a command stands still there.
    pub fn wait_until_it_stands(&self, step: &str, command: &str) {
        let line = format!(
            "for p in $(pgrep -f '{command}'); do grep -q 'State:.T' /proc/$p/status && exit 0; done; exit 1"
        );
        let deadline = Instant::now() + patience(Duration::from_secs(20));
        while self.run(&line).code != 0 {
            let seen = || self.run("ps axww -o stat,time,args | grep -E 'dewar|qemu'").stdout;
            assert!(Instant::now() < deadline, "it does not come to '{step}': {}", seen());
        }
    }

    /// What the link to the other host is like from here on (tc-netem(8)).
    pub fn link_is(&self, like: &str) {
        self.run("tc qdisc del dev eth1 root 2>/dev/null; true").done();
        if !like.is_empty() {
            self.run(&format!("tc qdisc add dev eth1 root netem {like}")).done();
        }
    }

    /// How much TCP holds for a connection that receives, and for one that sends (tcp(7), `tcp_rmem`, `tcp_wmem`).
    pub fn socket_buffers(&self, receive: &str, send: &str) {
        let sysctl = "/proc/sys/net/ipv4/tcp_";
        self.run(&format!("echo {receive} > {sysctl}rmem && echo {send} > {sysctl}wmem")).done();
    }

    /// Pulls the cable of the link, or plugs it in.
    pub fn cable(&self, is_plugged: bool) {
        let way = if is_plugged { "up" } else { "down" };
        let port = format!("{}1", self.name);
        let ran = Command::new("ip").args(["link", "set", &port, way]).status().expect("ip");
        assert!(ran.success());
    }
}
