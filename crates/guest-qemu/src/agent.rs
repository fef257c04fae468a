//! The guest agent (`qemu-ga`, docs/interop/qemu-ga-ref in QEMU's sources), by which a guest
//! that was brought back is set right: its clock, which is as old as what was saved, and the
//! addresses of its network cards, where it is a copy.

use crate::cmdline::{Properties, arguments};
use crate::identity::NewAddress;
use serde_json::{Value, json};
use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// The name of its port.
const PORT: &str = "org.qemu.guest_agent.0";
/// Why an agent did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// It says nothing, or not in time.
    #[error("its guest agent does not answer")]
    Silent,
    /// It has closed its end.
    #[error("its guest agent is not there")]
    Gone,
    /// It cannot, in its words.
    #[error("its guest agent: {0}")]
    Failed(String),
    /// Its socket failed.
    #[error("its guest agent's socket: {0}")]
    Socket(#[from] std::io::Error),
}

/// The socket at which the agent of a guest with this command line is reached, if it has one
/// that listens.
fn socket(line: &[String], folder: &Path) -> Option<PathBuf> {
    let all = arguments(line);
    let options = |name: &str| -> Vec<Properties> {
        let of = all.iter().filter(|it| it.name == name);
        of.filter_map(|it| Properties::parse(it.value?).ok()).collect()
    };
    let ports = options("device");
    let port = ports.iter().find(|it| it.get("name", "").as_deref() == Some(PORT))?;
    let chardev = port.get("chardev", "")?;
    let chardevs = options("chardev");
    let device = chardevs.iter().find(|it| it.get("id", "").as_deref() == Some(&chardev))?;
    let listens = device.switch("server") == Some(true);
    device.get("path", "").filter(|_| listens).map(|path| folder.join(path))
}

/// An agent that answers.
pub struct Agent {
    stream: UnixStream,
    answers: BufReader<UnixStream>,
    deadline: Instant,
}

impl Agent {
    /// The agent of the guest with this command line; nothing where it has none that listens
    /// on a unix socket. For all that it is asked it has so long: the guest's memory may still be
    /// arriving.
    ///
    /// # Errors
    /// Why it cannot be asked.
    pub fn of(
        line: &[String],
        folder: &Path,
        within: Duration,
    ) -> Option<Result<Self, AgentError>> {
        socket(line, folder).map(|socket| Self::connect(&socket, Instant::now() + within))
    }

    /// Whether a guest with this command line has one that could be asked.
    pub fn is_on(line: &[String], folder: &Path) -> bool {
        socket(line, folder).is_some()
    }

    fn connect(socket: &Path, deadline: Instant) -> Result<Self, AgentError> {
        let stream = UnixStream::connect(socket)?;
        let answers = BufReader::new(stream.try_clone()?);
        let mut agent = Self { stream, answers, deadline };
        // What it said to others before, or to us before it fell silent, is passed over.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let id = (u64::from(std::process::id()) << 32) | u64::from(now.subsec_nanos());
        agent.send("guest-sync", json!({"id": id}))?;
        while agent.answer()?["return"] != id {}
        Ok(agent)
    }

    /// Sets the guest's clock to the host's.
    ///
    /// # Errors
    /// Why it was not set.
    pub fn set_time(&mut self) -> Result<(), AgentError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.ask("guest-set-time", json!({"time": now.as_nanos() as u64})).map(drop)
    }

    /// Has the guest reboot. It answers nothing where it does.
    ///
    /// # Errors
    /// Where it cannot be told.
    pub fn reboot(&mut self) -> Result<(), AgentError> {
        self.send("guest-shutdown", json!({"mode": "reboot"}))
    }

    /// Gives the guest's network interfaces that have the old addresses the new ones.
    ///
    /// # Errors
    /// Where the guest has no such interface, or keeps its address.
    pub fn set_addresses(&mut self, changes: &[NewAddress]) -> Result<(), AgentError> {
        for change in changes {
            let interface = self.interface(&change.old)?.ok_or_else(|| {
                AgentError::Failed(format!("no interface has the address {}", change.old))
            })?;
            let set = ["link", "set", "dev", &interface, "address", &change.new];
            let said = self.run("ip", &set)?;
            if self.interface(&change.new)?.as_ref() != Some(&interface) {
                let what = format!("{interface} keeps its address {}: {said}", change.old);
                return Err(AgentError::Failed(what));
            }
        }
        // A bridge or a bond may have had it from the card.
        for NewAddress { old, .. } in changes {
            if let Some(other) = self.interface(old)? {
                return Err(AgentError::Failed(format!("{other} has the address {old}, too")));
            }
        }
        Ok(())
    }

    /// The name of the interface that has an address.
    fn interface(&mut self, address: &str) -> Result<Option<String>, AgentError> {
        let report = self.ask("guest-network-get-interfaces", json!({}))?;
        let all = report.as_array().into_iter().flatten();
        let mut its = all.filter(|it| {
            it["hardware-address"].as_str().is_some_and(|it| it.eq_ignore_ascii_case(address))
        });
        Ok(its.next().and_then(|it| it["name"].as_str()).map(str::to_owned))
    }

    /// Runs a program in the guest until it ends; returns what it wrote to say why it failed.
    fn run(&mut self, program: &str, arguments: &[&str]) -> Result<String, AgentError> {
        let line = json!({"path": program, "arg": arguments, "capture-output": true});
        let pid = self.ask("guest-exec", line)?["pid"].clone();
        loop {
            let status = self.ask("guest-exec-status", json!({"pid": pid}))?;
            if status["exited"] == true {
                let code = status["exitcode"]
                    .as_i64()
                    .map_or("a signal".to_owned(), |code| format!("code {code}"));
                return Ok(format!("'{program} {}' ended with {code}", arguments.join(" ")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, AgentError> {
        self.send(command, arguments)?;
        let mut said = self.answer()?;
        if let Some(answer) = said.get_mut("return") {
            return Ok(answer.take());
        }
        let why = said["error"]["desc"].as_str().unwrap_or("its answer is none");
        Err(AgentError::Failed(format!("{command}: {why}")))
    }

    fn send(&mut self, command: &str, arguments: Value) -> Result<(), AgentError> {
        let line = json!({"execute": command, "arguments": arguments});
        self.stream.set_write_timeout(Some(self.left()?))?;
        Ok(self.stream.write_all(format!("{line}\n").as_bytes())?)
    }

    fn answer(&mut self) -> Result<Value, AgentError> {
        const LONGEST: usize = 4 << 20;
        let mut line = Vec::new();
        // Byte by byte: a read timeout begins anew with each piece that comes.
        while line.last() != Some(&b'\n') {
            if line.len() >= LONGEST {
                return Err(AgentError::Silent);
            }
            self.answers.get_ref().set_read_timeout(Some(self.left()?))?;
            let mut byte = [0];
            match self.answers.read(&mut byte) {
                Ok(0) => return Err(AgentError::Gone),
                Ok(_) => line.push(byte[0]),
                Err(_) => return Err(AgentError::Silent),
            }
        }
        Ok(serde_json::from_slice(&line).unwrap_or(Value::Null))
    }

    /// How long it may still take.
    fn left(&self) -> Result<Duration, AgentError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(AgentError::Silent) } else { Ok(left) }
    }
}
