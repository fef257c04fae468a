//! The other host: a command that starts `dewar receive` there, whose standard input and output is the
//! connection.

use crate::failure::{Code, Failure};
use dewar_migrate::{Control, MigrateError, TunnelReader, TunnelWriter, take_apart};
use dewar_wire::control::{CONTROL, FIRST_DISK, MOST_DISKS, ToDestination, ToSource};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long the command may take to end when all was said.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(5);

/// A command that starts `dewar receive` at the other host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerCommand {
    /// The other host, for people.
    pub name: String,
    words: Vec<String>,
}

impl PeerCommand {
    /// By the user's ssh.
    pub fn ssh(host: &str, dewar: &str, root: Option<&Path>) -> Self {
        // ssh hands one line to the shell there.
        let line = receive(dewar, root).iter().map(|word| quoted(word)).collect::<Vec<_>>();
        let words = ["ssh", "-T", "--", host, &line.join(" ")].map(str::to_owned).to_vec();
        Self { name: host.to_owned(), words }
    }

    /// By a command line of the user's, before which nothing is needed and behind which a command may
    /// stand (`ip netns exec b`).
    pub fn via(command: &str, name: Option<&str>, dewar: &str, root: Option<&Path>) -> Self {
        let mut words =
            ["sh", "-c", &format!("exec {command} \"$@\""), "sh"].map(str::to_owned).to_vec();
        words.extend(receive(dewar, root));
        Self { name: name.unwrap_or(command).to_owned(), words }
    }

    /// Starts it and greets the other side, about the migration of this session.
    pub(crate) fn connect(&self, session: u64) -> Result<Peer, Failure> {
        let failed = |why: String| {
            let what = format!("'{}' cannot be reached: {why}", self.name);
            Failure::new(Code::Failed, what)
        };
        let child = Command::new(&self.words[0])
            .args(&self.words[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = child.map_err(|error| failed(format!("{}: {error}", self.words[0])))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("it has no input or output".to_owned()));
        };
        let pages = TunnelWriter::new(input);
        let mut disks = take_apart(output, &shards(&[CONTROL]));
        let from = disks.remove(0);
        let mut process = Running(child);
        match Control::greet(from, pages.another(), session) {
            Ok(control) => {
                let child = Pid::from_child(&process.0);
                // What is sent through it waits for it.
                control.when_silent(move || {
                    let _ = kill_process(child, Signal::KILL);
                });
                Ok(Peer { process, control, pages, disks })
            }
            Err(error) => {
                // One that still waits for what we say is not waited for.
                drop(pages);
                let ended = process.end().filter(|_| matches!(error, MigrateError::NoAnswer));
                let status = ended.map(|status| format!("; '{}': {status}", self.words.join(" ")));
                Err(failed(format!("{error}{}", status.unwrap_or_default())))
            }
        }
    }
}

/// `dewar receive`, there.
fn receive(dewar: &str, root: Option<&Path>) -> Vec<String> {
    let mut words = vec![dewar.to_owned()];
    if let Some(root) = root {
        words.extend(["--root".to_owned(), root.display().to_string()]);
    }
    words.push("receive".to_owned());
    words
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./=:,+@%".contains(letter);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// The connections of a tunnel: these, and those of disks.
pub(crate) fn shards(first: &[u16]) -> Vec<u16> {
    first.iter().copied().chain(FIRST_DISK..FIRST_DISK + MOST_DISKS).collect()
}

/// `dewar receive` at the other host.
pub(crate) struct Peer {
    pub process: Running,
    pub control: Control<ToDestination, ToSource>,
    /// Where pages go.
    pub pages: TunnelWriter<ChildStdin>,
    /// What the disks' connections say.
    pub disks: Vec<TunnelReader>,
}

/// The command that leads to the other host. Dropped when its connections are, it has a moment to end.
pub(crate) struct Running(Child);

impl Running {
    /// Gives it a moment to end, and says how it did; where it did not it is killed.
    fn end(&mut self) -> Option<ExitStatus> {
        let deadline = Instant::now() + ENDS_WITHIN;
        loop {
            match self.0.try_wait() {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL),
                Ok(Some(status)) => return Some(status),
                _ => break,
            }
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
        None
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_through_two_shells_as_they_are() {
        let root = Path::new("/a b/it's");
        let ssh = PeerCommand::ssh("h", "dewar", Some(root));
        assert_eq!(ssh.words[4], r"dewar --root '/a b/it'\''s' receive");
        let said =
            Command::new("sh").args(["-c", &format!("printf '%s|' {}", ssh.words[4])]).output();
        assert_eq!(said.expect("sh").stdout, b"dewar|--root|/a b/it's|receive|");
        let via = PeerCommand::via("env A=b printf '%s|'", None, "dewar", Some(root));
        let said = Command::new(&via.words[0]).args(&via.words[1..]).output();
        assert_eq!(said.expect("sh").stdout, b"dewar|--root|/a b/it's|receive|");
    }
}
