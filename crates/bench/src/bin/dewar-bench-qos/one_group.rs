//! All threads in one group of the scheduler, as long as a bench lasts.
//!
//! With `kernel.sched_autogroup_enabled` each session is a group (sched(7)). A QEMU in a
//! session of its own then has as much as all hogs of another one together, and a nice value
//! counts within its session only: what would be compared are sessions.
//!
//! A shell waits for the bench's end and turns the setting on again, however that end comes: it
//! reads from a pipe that ends with the bench, and what ends the bench's group does not end it.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

const SETTING: &str = "/proc/sys/kernel/sched_autogroup_enabled";

/// Holds the setting off; as it was when dropped, or killed.
pub struct OneGroup {
    waiter: Option<Child>,
}

impl OneGroup {
    /// Turns it off, or says that it stays on.
    pub fn hold() -> Self {
        let was_on = fs::read_to_string(SETTING).is_ok_and(|it| it.trim() == "1");
        if !was_on {
            return Self { waiter: None };
        }
        let waiter = wait_for_the_end().and_then(|waiter| fs::write(SETTING, "0").map(|()| waiter));
        match &waiter {
            Ok(_) => println!("{SETTING} was 1, and is 0 until the end"),
            Err(error) => println!("{SETTING} is 1, and stays so: {error}"),
        }
        Self { waiter: waiter.ok() }
    }
}

impl Drop for OneGroup {
    fn drop(&mut self) {
        if let Some(waiter) = &mut self.waiter {
            drop(waiter.stdin.take());
            let _ = waiter.wait();
        }
    }
}

fn wait_for_the_end() -> std::io::Result<Child> {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("read never; echo 1 >{SETTING}")]).process_group(0);
    shell.stdin(Stdio::piped()).stderr(Stdio::null()).spawn()
}
