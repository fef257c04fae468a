//! What the guest tests share.
#![allow(dead_code, reason = "each test file uses some of it")]

use dewar_testkit::Lab;
use std::path::PathBuf;
use std::process::{Child, Stdio};

pub fn lab() -> Lab {
    Lab::new(env!("CARGO_BIN_EXE_dewar")).expect("a lab")
}

/// A checkpoint that stops itself (SIGSTOP) at a step.
pub struct HeldCheckpoint {
    pub child: Child,
    pub pid: i32,
}

impl HeldCheckpoint {
    /// Starts it and waits until it stands there.
    pub fn at(lab: &Lab, guest: &str, step: &str) -> Self {
        let child = lab
            .command(&["checkpoint", guest])
            .env("DEWAR_TEST_SIGNAL", format!("{step}:stop"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("dewar starts");
        let pid = child.id() as i32;
        dewar_testkit::wait_until(
            &format!("step {step}"),
            std::time::Duration::from_secs(60),
            || {
                assert!(dewar_testkit::is_alive(pid), "the checkpoint ended before step {step}");
                dewar_testkit::signal_stop(pid)
            },
        );
        Self { child, pid }
    }

    /// Lets it go on to its end; returns exit code, output and messages.
    pub fn go_on(self) -> (i32, String, String) {
        dewar_testkit::kill(self.pid, rustix::process::Signal::CONT);
        let output = self.child.wait_with_output().expect("wait");
        (
            output.status.code().unwrap_or(-1),
            String::from_utf8_lossy(&output.stdout).into_owned(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    }

    /// Kills it where it stands.
    pub fn kill(mut self) {
        dewar_testkit::kill(self.pid, rustix::process::Signal::KILL);
        self.child.wait().expect("wait");
    }

    /// The process that watches over it.
    pub fn guardian(&self) -> Option<i32> {
        children(self.pid).into_iter().find(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains("__guardian")
        })
    }
}

fn children(of: i32) -> Vec<i32> {
    let tasks = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children"));
    tasks.unwrap_or_default().split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// All files under a folder.
pub fn files(root: &std::path::Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
        match entry.path() {
            path if path.is_dir() => found.extend(files(&path)),
            path => found.push(path),
        }
    }
    found.sort();
    found
}
