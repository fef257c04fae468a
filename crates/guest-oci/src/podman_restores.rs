//! The podmans that are bringing containers back: the next command finds them, should ours be killed.

use crate::folder::{podman_archive, podman_folder};
use crate::podman::Podman;
use crate::processes::field;
use crate::stand_in;
use dewar_kernel::{Pid, ProcessHandle};
use rustix::process::{Signal, geteuid, kill_process};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long one that is asked to end may take, and a killed one to be gone.
const ENDS_WITHIN: Duration = Duration::from_secs(3);
const GONE_WITHIN: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(5);

impl Podman {
    /// Whether some podman is bringing a container back from a folder.
    pub(crate) fn is_restoring(folder: &Path) -> bool {
        !restoring(folder).is_empty()
    }

    /// Ends those that are. What they have started goes on.
    pub fn end_restores(folder: &Path) {
        let began = Instant::now();
        for process in restoring(folder) {
            // Killed in the middle of some changes it leaves files that nobody knows.
            if let Some(pid) = rustix::process::Pid::from_raw(process.pid().0) {
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        while Self::is_restoring(folder) && began.elapsed() < ENDS_WITHIN + GONE_WITHIN {
            if began.elapsed() > ENDS_WITHIN {
                restoring(folder).iter().for_each(|process| drop(process.kill()));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Whether a container with this first process was brought back from this folder. One that podman has started anew
    /// since was not.
    pub fn was_restored_from(folder: &Path, pid: i32) -> bool {
        let stand_in = stand_in::path(&podman_folder(folder));
        // conmon, its parent, was told by which runtime it was started.
        let conmon = field(pid, "PPid:").map_or(0, |it| it[0]);
        has_word(conmon, &stand_in)
    }
}

/// The podmans that bring a container back from a folder, by the archive that they were told.
fn restoring(folder: &Path) -> Vec<ProcessHandle> {
    let archive = podman_archive(folder);
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|it| it.file_name().to_string_lossy().parse::<i32>().ok());
    pids.filter_map(|pid| {
        // Opened first: the number may be another's a moment later.
        let process = ProcessHandle::open(Pid(pid)).ok()?;
        let owner = fs::metadata(format!("/proc/{pid}")).ok()?.uid();
        (has_word(pid, &archive) && owner == geteuid().as_raw()).then_some(process)
    })
    .collect()
}

/// Whether a path is among the arguments of a process.
fn has_word(pid: i32, path: &Path) -> bool {
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    words.split(|byte| *byte == 0).any(|word| word == path.as_os_str().as_bytes())
}
