//! Runs a command over a link: `dewar-link MBIT DELAY_MS COMMAND...`. What comes in on standard input goes
//! to the command at that speed, and back; 0 is no limit. Killed, it is a link that is cut.

use anyhow::{Context, Result};
use dewar_testkit::{Lane, LinkSpeed, carry};
use std::io::{stdin, stdout};
use std::process::{Command, Stdio};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = || -> Result<f64> { Ok(arguments.next().context("a number")?.parse()?) };
    let (mbit, delay) = (number()?, number()?);
    let speed = LinkSpeed::new(mbit, delay);
    let program = arguments.next().context("a command")?;
    let mut command = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (to, from) = command.stdin.take().zip(command.stdout.take()).context("pipes")?;
    let _there = carry(stdin(), to, &Lane::new(speed));
    // The command has ended when it says no more.
    let _ = carry(from, stdout(), &Lane::new(speed)).join();
    command.wait()?;
    Ok(())
}
