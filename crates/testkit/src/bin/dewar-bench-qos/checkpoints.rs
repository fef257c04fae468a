//! Another guest, of which one checkpoint after the other is taken.

use anyhow::Result;
use dewar_testkit::{GuestSpec, Lab};
use std::process::{Child, Command, Stdio};

/// Checkpoints without end, until it is dropped.
pub struct Checkpoints {
    shell: Child,
}

impl Checkpoints {
    /// Starts the guest, and them.
    pub fn start(lab: &Lab) -> Result<Self> {
        let spec = GuestSpec { memory_mib: 768, ..GuestSpec::default() };
        let mut guest = lab.run("c", &spec)?;
        guest.console.ask("fill 500 noise")?;
        guest.console.ask("words 2000")?;
        let dewar = lab.command(&[]);
        let line =
            "while \"$0\" \"$@\" checkpoint c --full --codec zstd; do \"$0\" \"$@\" delete c; done";
        let mut shell = Command::new("sh");
        shell.args(["-c", line]).arg(dewar.get_program()).args(dewar.get_args());
        shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { shell: shell.spawn()? })
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
