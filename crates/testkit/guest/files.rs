//! A program that works with files: it writes, renames and removes them in a real file
//! system, and remembers what each must hold.
//!
//! What the file system has in memory and what it has on the disk fit together only if
//! both are of one instant. So the check writes all back, has the kernel forget what it
//! knows, and reads every file from the disk.

use crate::{Checked, random, word_of};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

/// Names that files may have.
const NAMES: u64 = 200;
/// Most words of a file.
const MOST_WORDS: u64 = 8 << 10;
/// Time between two steps: it wants some of a CPU, not all.
const REST: Duration = Duration::from_millis(3);

/// What a file holds: the step at which it was written, and how many words.
#[derive(Clone, Copy)]
struct Known {
    step: u64,
    words: u64,
}

pub struct Files {
    folder: PathBuf,
    /// Where the kernel counts what it found wrong with the file system.
    errors: PathBuf,
    state: u64,
    step: u64,
    known: BTreeMap<u64, Known>,
}

impl Files {
    pub fn mount(disk: &str) -> Result<Self, String> {
        run("mount", &["-t", "ext4", disk, "/mnt"])?;
        let folder = PathBuf::from("/mnt/files");
        fs::create_dir(&folder).map_err(|error| error.to_string())?;
        let device = Path::new(disk).file_name().ok_or("which disk?")?;
        let errors = Path::new("/sys/fs/ext4").join(device).join("errors_count");
        Ok(Self { folder, errors, state: 0x0bad_cafe, step: 0, known: BTreeMap::new() })
    }

    fn path(&self, name: u64) -> PathBuf {
        self.folder.join(name.to_string())
    }

    fn write(&mut self, name: u64, words: u64) -> std::io::Result<()> {
        let known = Known { step: self.step, words };
        let part = self.folder.join("part");
        let mut file = File::create(&part)?;
        file.write_all(&content(known))?;
        if self.step % 4 == 0 {
            file.sync_all()?;
        }
        fs::rename(&part, self.path(name))?;
        self.known.insert(name, known);
        Ok(())
    }

    fn check_files(&self) -> std::io::Result<()> {
        let wrong = |what: String| Err(std::io::Error::other(what));
        for (name, known) in &self.known {
            if fs::read(self.path(*name))? != content(*known) {
                return wrong(format!("file {name} is not that of step {}", known.step));
            }
        }
        let there = fs::read_dir(&self.folder)?.count();
        if there != self.known.len() {
            return wrong(format!("there are {there} files, not {}", self.known.len()));
        }
        match fs::read_to_string(&self.errors)?.trim() {
            "0" => Ok(()),
            count => wrong(format!("the kernel found {count} errors in the file system")),
        }
    }
}

impl Checked for Files {
    fn step(&mut self) -> Result<(), String> {
        thread::sleep(REST);
        self.step += 1;
        let number = random(&mut self.state);
        let (name, other) = (number % NAMES, (number >> 16) % NAMES);
        let done = match (number >> 32) % 8 {
            0 if self.known.remove(&name).is_some() => fs::remove_file(self.path(name)),
            1 if name != other => match self.known.remove(&name) {
                Some(known) => {
                    self.known.insert(other, known);
                    fs::rename(self.path(name), self.path(other))
                }
                None => Ok(()),
            },
            _ => self.write(name, (number >> 40) % MOST_WORDS),
        };
        done.map_err(|error| format!("step {}: {error}", self.step))
    }

    fn verify(&mut self) -> Result<u64, String> {
        run("sync", &[])?;
        fs::write("/proc/sys/vm/drop_caches", "3").map_err(|error| error.to_string())?;
        self.check_files().map_err(|error| error.to_string())?;
        Ok(self.step)
    }
}

fn content(known: Known) -> Vec<u8> {
    (0..known.words).flat_map(|at| word_of(known.step, at, 0).to_le_bytes()).collect()
}

fn run(program: &str, words: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(words).output().map_err(|error| error.to_string())?;
    let said = || String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    output.status.success().then_some(()).ok_or_else(|| format!("{program}: {}", said()))
}
