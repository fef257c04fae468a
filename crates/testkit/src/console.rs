use crate::process::patience;
use anyhow::{Context, Result, bail};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What the guest's program says first.
const READY: &str = "dewar-guest ready";

/// The serial port over which the guest's program obeys.
#[derive(Debug)]
pub struct Console {
    path: PathBuf,
    stream: UnixStream,
    received: Vec<u8>,
}

impl Console {
    /// Connects to a guest's first serial port.
    ///
    /// # Errors
    /// Where nobody offers it within 10 s.
    pub fn connect(path: &Path) -> Result<Self> {
        let deadline = Instant::now() + patience(Duration::from_secs(10));
        loop {
            match UnixStream::connect(path) {
                Ok(stream) => {
                    return Ok(Self { path: path.to_owned(), stream, received: Vec::new() });
                }
                Err(error) if Instant::now() > deadline => {
                    return Err(error).with_context(|| path.display().to_string());
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Waits until the guest's program says that it is ready.
    ///
    /// # Errors
    /// Where it does not within the time.
    pub fn wait_ready(&mut self, within: Duration) -> Result<()> {
        self.wait_for(READY, within)
    }

    /// Waits until the guest prints a line with these words.
    ///
    /// # Errors
    /// Where it does not within the time.
    pub fn wait_for(&mut self, words: &str, within: Duration) -> Result<()> {
        let deadline = Instant::now() + patience(within);
        while !self.line(deadline)?.contains(words) {}
        Ok(())
    }

    /// Gives a command and returns what follows `ok`.
    ///
    /// # Errors
    /// Where the answer is `bad`, or none comes within two minutes.
    pub fn ask(&mut self, command: &str) -> Result<String> {
        self.stream.write_all(format!("{command}\n").as_bytes())?;
        let deadline = Instant::now() + patience(Duration::from_secs(120));
        loop {
            let line = self.line(deadline).with_context(|| format!("answer to '{command}'"))?;
            if let Some(answer) = line.strip_prefix("@ok") {
                return Ok(answer.trim().to_owned());
            }
            if let Some(why) = line.strip_prefix("@bad") {
                bail!("the guest answers '{command}': {}", why.trim());
            }
            if line.contains(READY) {
                bail!(
                    "the guest restarted instead of an answer to '{command}': its program died, or it had no memory left"
                );
            }
        }
    }

    /// Gives a command that has no answer, such as `quit`.
    ///
    /// # Errors
    /// Where the port is closed.
    pub fn send(&mut self, command: &str) -> Result<()> {
        Ok(self.stream.write_all(format!("{command}\n").as_bytes())?)
    }

    /// Gives a command whose answer is a number.
    ///
    /// # Errors
    /// As [`Console::ask`].
    pub fn ask_number(&mut self, command: &str) -> Result<u64> {
        Ok(self.ask(command)?.parse()?)
    }

    fn line(&mut self, deadline: Instant) -> Result<String> {
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim().to_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("the guest is silent; {}", crate::silence::describe(&self.path));
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => bail!("the guest's serial port was closed"),
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
