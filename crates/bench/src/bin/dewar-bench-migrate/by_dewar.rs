//! By Dewar, between two hosts on this machine, through a tunnel over the link.

use crate::subject::{Figures, Load, command, fill, load, time};
use anyhow::{Context, Result, ensure};
use dewar_bench::listen;
use dewar_testkit::{Console, Heartbeat, Lab};
use std::path::{Path, PathBuf};

/// One of Dewar's ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// As it is without options: 50 ms may it stand still.
    Default,
    /// With the pause that is QEMU's default: 300 ms.
    AsQemu,
    /// It runs there when every page was sent once.
    PostCopy,
    /// No GPU helps.
    Cores,
    /// One encodes all that it can.
    Gpu,
}

impl Way {
    /// Those that any machine has.
    pub const USUAL: [Self; 3] = [Self::Default, Self::AsQemu, Self::PostCopy];
    pub const ALL: [Self; 5] =
        [Self::Default, Self::AsQemu, Self::PostCopy, Self::Cores, Self::Gpu];

    pub fn word(self) -> &'static str {
        match self {
            Self::Default => "dewar",
            Self::AsQemu => "dewar-300ms",
            Self::PostCopy => "dewar-postcopy",
            Self::Cores => "dewar-cores",
            Self::Gpu => "dewar-gpu",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "dewar",
            Self::AsQemu => "dewar, 300 ms",
            Self::PostCopy => "dewar post-copy",
            Self::Cores => "dewar, cores",
            Self::Gpu => "dewar, GPU",
        }
    }

    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Default => &[],
            Self::AsQemu => &["--max-downtime", "300ms"],
            Self::PostCopy => &["--postcopy"],
            Self::Cores => &["--gpu", "never"],
            Self::Gpu => &["--gpu", "always"],
        }
    }
}

/// A guest on one of two hosts.
pub struct ByDewar {
    /// The host that has it first.
    hosts: [Lab; 2],
    link: PathBuf,
    heart: Heartbeat,
}

impl ByDewar {
    /// Starts and fills one.
    pub fn start(dewar: &Path, mib: u64, mix: &str) -> Result<Self> {
        let first = Lab::new(dewar)?.as_host()?;
        let folder = first.guest_folder("g")?;
        let line = command(&folder, mib)?;
        let second = first.second_host(&["g"])?;
        let heart = listen(&folder)?;
        let words: Vec<&str> = line.iter().map(String::as_str).collect();
        let ran = first.dewar(&[&["run", "g", "--"], &words[..]].concat());
        ensure!(ran.code == 0, "dewar run: {}", ran.stderr);
        let mut guest = first.reach("g")?;
        fill(&mut guest.console, mib, mix)?;
        let link = std::env::current_exe()?.with_file_name("dewar-link");
        Ok(Self { hosts: [first, second], link, heart })
    }

    /// Moves it to the other host. Nothing is measured where it does not move: it writes too fast.
    pub fn measure(&mut self, way: Way, mbit: f64, writes: (Load, u64)) -> Result<Option<Figures>> {
        let [from, to] = &self.hosts;
        let mut console = Console::connect(&from.guest_folder("g")?.join("console"))?;
        load(&mut console, writes)?;
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
        ];
        let mut stays = false;
        let figures = time(&self.heart, || {
            let ran = from.dewar(&[&line, way.options()].concat());
            stays = ran.code == 1 && ran.stderr.contains("writes faster");
            if stays {
                return Ok(0);
            }
            ensure!(ran.code == 0, "dewar migrate: {}", ran.stderr);
            let told = ran.json();
            let pages = told["bytes"].as_u64().context("bytes")?;
            Ok(pages + told["state_bytes"].as_u64().context("state")?)
        })?;
        if stays {
            return Ok(None);
        }
        self.hosts.swap(0, 1);
        Ok(Some(figures))
    }
}
