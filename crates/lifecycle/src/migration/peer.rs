//! The other host: a command that runs `dewar` there. Standard input and output of `dewar receive` are the
//! connection of a migration.

use crate::failure::{Code, Failure};
use dewar_migrate::{Control, MigrateError, TunnelReader, TunnelWriter, take_apart};

use dewar_qos::{Entry, Promise};
use dewar_wire::control::{CONTROL, FIRST_DISK, MOST_DISKS, ToDestination, ToSource};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long the command may take to end when all was said.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
/// How long a command there may take that only tells the other host something.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(5);

/// How `dewar` is run at the other host.
#[derive(Debug, Clone, Copy)]
pub struct OtherHost<'o> {
    /// A command line that runs the words that follow it there (`ip netns exec b`); `None`: the user's ssh.
    pub via: Option<&'o str>,
    /// Its name: for ssh, and for people.
    pub host: Option<&'o str>,
    /// The program there.
    pub dewar: &'o str,
    /// Its `--root`, where that is not the usual one.
    pub root: Option<&'o Path>,
}

impl OtherHost<'_> {
    /// The command that takes part in a migration there.
    pub fn receiver(&self) -> PeerCommand {
        PeerCommand { name: self.name().to_owned(), words: self.command(&["receive"]) }
    }

    /// Its name, for people.
    pub fn name(&self) -> &str {
        self.host.or(self.via).unwrap_or_default()
    }

    /// Promises a guest there what it was promised here. Returns what is said there.
    ///
    /// # Errors
    /// Where it cannot be promised, or the host does not answer in time; the failure says what to do.
    pub fn reserve(&self, guest: &str, entry: &Entry) -> Result<String, Failure> {
        let Promise { rate, miss, min, max, .. } = entry.promise;
        // Shares were percent once.
        let percent = |share: f64| format!("{}%", (share * 1e8).round() / 1e6);
        let options = [
            ("--target", format!("{rate}/s")),
            ("--miss", percent(miss)),
            ("--min", percent(min)),
            ("--max", percent(max)),
            ("--law", entry.law.clone()),
            ("--by", entry.by.clone()),
        ];
        let options = options.iter().flat_map(|(name, value)| [*name, value]);
        let verb: Vec<&str> = ["qos", guest, "--detach"].into_iter().chain(options).collect();
        let words = self.command(&verb);
        run(&words).map_err(|why| {
            let what = format!("its reservation of CPU time did not come along: {why}");
            let line: Vec<String> = self.words(&verb).iter().map(|word| quoted(word)).collect();
            let advice = format!("at {}: {}", self.name(), line.join(" "));
            Failure::new(Code::Failed, what).advice(advice)
        })
    }

    /// The words of a verb of `dewar` there.
    fn words(&self, verb: &[&str]) -> Vec<String> {
        let root = self.root.map(|root| ["--root".to_owned(), root.display().to_string()]);
        let words = std::iter::once(self.dewar.to_owned()).chain(root.into_iter().flatten());
        words.chain(verb.iter().map(|word| (*word).to_owned())).collect()
    }

    /// The command that runs a verb of `dewar` there.
    fn command(&self, verb: &[&str]) -> Vec<String> {
        let words = self.words(verb);
        let Some(via) = self.via else {
            // ssh hands one line to the shell there.
            let line = words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
            return ["ssh", "-T", "--", self.name(), &line].map(str::to_owned).to_vec();
        };
        let line = format!("exec {via} \"$@\"");
        let shell = ["sh", "-c", &line, "sh"].map(str::to_owned);
        shell.into_iter().chain(words).collect()
    }
}

/// A command that starts `dewar receive` at the other host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerCommand {
    /// The other host, for people.
    pub name: String,
    words: Vec<String>,
}

impl PeerCommand {
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

/// Runs a command that says something on its standard error; what it says, or else why it failed.
fn run(words: &[String]) -> Result<String, String> {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("{}: {error}", words[0]))?;
    let stderr = child.stderr.take();
    let reader = std::thread::spawn(move || {
        let mut said = String::new();
        let _ = stderr.map(|mut stderr| stderr.read_to_string(&mut said));
        said.trim().to_owned()
    });
    let ended = Running(child).end_within(ANSWERS_WITHIN);
    let Some(status) = ended else {
        return Err(format!("no answer within {} s", ANSWERS_WITHIN.as_secs()));
    };
    let said = reader.join().unwrap_or_default();
    match status.success() {
        true => Ok(said),
        false if said.is_empty() => Err(status.to_string()),
        false => Err(said),
    }
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
        self.end_within(ENDS_WITHIN)
    }

    fn end_within(&mut self, time: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + time;
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
        let ssh = OtherHost { via: None, host: Some("h"), dewar: "dewar", root: Some(root) };
        let ssh = ssh.receiver();
        assert_eq!(ssh.words[4], r"dewar --root '/a b/it'\''s' receive");
        let said =
            Command::new("sh").args(["-c", &format!("printf '%s|' {}", ssh.words[4])]).output();
        assert_eq!(said.expect("sh").stdout, b"dewar|--root|/a b/it's|receive|");
        let via = Some("env A=b printf '%s|'");
        let via = OtherHost { via, host: None, dewar: "dewar", root: Some(root) }.receiver();
        let said = Command::new(&via.words[0]).args(&via.words[1..]).output();
        assert_eq!(said.expect("sh").stdout, b"dewar|--root|/a b/it's|receive|");
    }
}
