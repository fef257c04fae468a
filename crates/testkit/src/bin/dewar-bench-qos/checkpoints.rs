//! A guest of which one checkpoint after the other is taken.

use anyhow::Result;
use dewar_testkit::{GuestSpec, Lab};
use std::process::{Child, Command, Stdio};

/// Checkpoints without end, until it is dropped.
pub struct Checkpoints {
    shell: Child,
}

impl Checkpoints {
    /// Starts another guest, and them.
    pub fn of_another(lab: &Lab) -> Result<Self> {
        let spec = GuestSpec { memory_mib: 768, ..GuestSpec::default() };
        let mut guest = lab.run("c", &spec)?;
        guest.console.ask("fill 500 noise")?;
        guest.console.ask("words 2000")?;
        Self::of(lab, "c")
    }

    /// Starts them, of a guest that runs.
    pub fn of(lab: &Lab, name: &str) -> Result<Self> {
        let dewar = lab.command(&[]);
        let line = format!(
            "while :; do \"$0\" \"$@\" checkpoint {name} --full && \"$0\" \"$@\" delete {name}; done"
        );
        let mut shell = Command::new("sh");
        shell.args(["-c", &line]).arg(dewar.get_program()).args(dewar.get_args());
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
