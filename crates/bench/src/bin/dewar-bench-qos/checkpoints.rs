//! A guest of which one checkpoint after the other is taken.

use anyhow::{Result, ensure};
use dewar_testkit::{GuestSpec, Lab};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Checkpoints without end, until it is dropped.
pub struct Checkpoints {
    shell: Child,
    /// A line for each that was taken.
    log: PathBuf,
}

impl Checkpoints {
    /// Starts another guest, and them.
    pub fn of_another(lab: &Lab) -> Result<Self> {
        let spec = GuestSpec { memory_mib: 768, beat_ms: 1, ..GuestSpec::measured() };
        let mut guest = lab.run("c", &spec)?;
        guest.console.ask("fill 500 noise")?;
        guest.console.ask("words 2000")?;
        Self::of(lab, "c")
    }

    /// Starts them, of a guest that runs.
    pub fn of(lab: &Lab, name: &str) -> Result<Self> {
        let dewar = lab.command(&[]);
        let line = format!(
            "while :; do \"$0\" \"$@\" checkpoint {name} --full >&2 && \"$0\" \"$@\" delete {name} >&2 && echo; done"
        );
        let mut shell = Command::new("sh");
        shell.args(["-c", &line]).arg(dewar.get_program()).args(dewar.get_args());
        let log = lab.path().join("checkpoints");
        shell.stdin(Stdio::null()).stdout(File::create(&log)?).stderr(Stdio::null());
        Ok(Self { shell: shell.spawn()?, log })
    }

    /// How many were taken.
    pub fn count(&self) -> Result<usize> {
        let count = std::fs::read(&self.log)?.len();
        ensure!(count > 0, "no checkpoint was taken");
        Ok(count)
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
