//! The two pipes by which a test speaks to the program in a container.

use crate::process::patience;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Commands go in by one, and answers come by the other.
#[derive(Debug)]
pub(crate) struct Pipes {
    commands: File,
    answers: File,
    received: Vec<u8>,
}

impl Pipes {
    /// Makes them in a folder.
    pub(crate) fn make(folder: &Path) -> Result<()> {
        for name in ["commands", "answers"] {
            let mode = Mode::from_raw_mode(0o600);
            mknodat(CWD, folder.join(name), FileType::Fifo, mode, 0)?;
        }
        Ok(())
    }

    /// Opens those of a folder.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let flags = OFlags::NONBLOCK.bits() as i32;
        let open = |name: &str| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).custom_flags(flags).open(folder.join(name))
        };
        Ok(Self { commands: open("commands")?, answers: open("answers")?, received: Vec::new() })
    }

    /// Gives the program a command and returns what follows `ok`. The answer `bad`, and none in time, are errors.
    pub(crate) fn ask(&mut self, command: &str) -> Result<String> {
        self.commands.write_all(format!("{command}\n").as_bytes())?;
        let deadline = Instant::now() + patience(Duration::from_secs(60));
        loop {
            let line = self.line(deadline).with_context(|| format!("answer to '{command}'"))?;
            if let Some(answer) = line.strip_prefix("@ok") {
                return Ok(answer.trim().to_owned());
            }
            if let Some(why) = line.strip_prefix("@bad") {
                bail!("the container answers '{command}': {}", why.trim());
            }
        }
    }

    fn line(&mut self, deadline: Instant) -> Result<String> {
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim().to_owned());
            }
            ensure!(Instant::now() < deadline, "the container is silent");
            let mut buffer = [0; 4096];
            match self.answers.read(&mut buffer) {
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
