//! By Dewar, between two hosts on this machine, through a tunnel over the link.

use crate::subject::{Figures, command, fill, listen, load, time};
use anyhow::{Context, Result, ensure};
use dewar_testkit::{Console, Heartbeat, Lab};
use std::path::{Path, PathBuf};

/// A guest on one of two hosts.
pub struct ByDewar {
    /// The host that has it first.
    hosts: [Lab; 2],
    link: PathBuf,
    heart: Heartbeat,
}

impl ByDewar {
    /// Starts and fills one.
    pub fn start(dewar: &Path, mib: u64) -> Result<Self> {
        let first = Lab::new(dewar)?.as_host()?;
        let folder = first.guest_folder("g")?;
        let line = command(&folder, mib)?;
        let second = first.second_host(&["g"])?;
        let heart = listen(&folder)?;
        let words: Vec<&str> = line.iter().map(String::as_str).collect();
        let ran = first.dewar(&[&["run", "g", "--"], &words[..]].concat());
        ensure!(ran.code == 0, "dewar run: {}", ran.stderr);
        let mut guest = first.reach("g")?;
        fill(&mut guest.console, mib)?;
        let link = std::env::current_exe()?.with_file_name("dewar-link");
        Ok(Self { hosts: [first, second], link, heart })
    }

    /// Moves it to the other host.
    pub fn measure(&mut self, mbit: f64, rate: u64) -> Result<Figures> {
        let [from, to] = &self.hosts;
        let mut console = Console::connect(&from.guest_folder("g")?.join("console"))?;
        load(&mut console, rate)?;
        drop(console);
        let via = format!("{} {mbit} 0 {}", self.link.display(), to.via());
        let (root, program) = (to.root().display().to_string(), to.program().display().to_string());
        let line = [
            "migrate",
            "g",
            "--tunnel",
            "--via",
            &via,
            "--remote-root",
            &root,
            "--remote-dewar",
            &program,
            "--max-downtime",
            "300ms",
        ];
        let figures = time(&self.heart, || {
            let ran = from.dewar(&line);
            ensure!(ran.code == 0, "dewar migrate: {}", ran.stderr);
            let told = ran.json();
            let pages = told["bytes"].as_u64().context("bytes")?;
            Ok(pages + told["state_bytes"].as_u64().context("state")?)
        })?;
        self.hosts.swap(0, 1);
        Ok(figures)
    }
}
