//! A guest that is held at its reset, and gets other memory there.
//!
//! QEMU is told to stop at a reset in place of doing it (`set-action reboot=shutdown,shutdown=pause`). The guest's memory is
//! as it was then, and nobody uses it. An empty file takes the place of each RAM file; what the guest had stays ours:
//!
//! ```text
//!   held      QEMU said SHUTDOWN, and stands still
//!   made      NAME.next: as large, and empty but for what the firmware left below 1 MiB
//!   mapped    QEMU has it in place of NAME: mmap(MAP_FIXED) and dup3, by injection (its descriptor came by `getfd`)
//!   renamed   NAME.next is NAME; the old file has no name any more
//!   reset     reboot=reset, system_reset: it stands still, in state "prelaunch"
//!   runs      cont
//! ```
//!
//! **If we die** between these: until "mapped" NAME.next is in nobody's use, and is removed. From then on it is the guest's
//! memory, and is given its name ([`settle`]). Then the guest is reset, as it was to be. A guest that is held and has
//! nobody is seen by its state, "shutdown"; one that was reset and is to run only by what its holder wrote down before.
//!
//! With a fresh file that is empty below 1 MiB a q35 machine does not boot: QEMU's firmware is shadowed there once, when
//! the machine is made. So that part is copied.

use crate::qmp::{Qmp, QmpError};
use crate::run_state::RunState;
use crate::state::is_migrating;
use dewar_kernel::{KernelError, Pid, duplicate_in, list_fds, map_over_in};
use dewar_registry::{GuestRecord, ProcessId, RamFile};
use procfs::process::{MMapPath, Process};
use serde_json::json;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where firmware is shadowed, in guest addresses.
const SHADOW: Range<u64> = 0xc_0000..0x10_0000;
/// How long QEMU may take to reset the machine.
const RESETS_WITHIN: Duration = Duration::from_secs(10);
/// What QEMU knows a passed descriptor by.
const PASSED: &str = "dewar-next-ram";

/// Why a guest's memory was not set aside, or it could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetError {
    /// QEMU refused, or is gone.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A file could not be made or moved.
    #[error("cannot {operation} {}: {cause}", path.display())]
    File {
        /// What was being done.
        operation: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system answered.
        #[source]
        cause: io::Error,
    },
    /// QEMU has the memory otherwise than this can handle.
    #[error("QEMU has {} mapped in a way that cannot be exchanged", path.display())]
    Mapped {
        /// The RAM file.
        path: PathBuf,
    },
}

fn file(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ResetError {
    let path = path.to_owned();
    move |cause| ResetError::File { operation, path, cause }
}

/// What a QEMU was about to do when it stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// To reset its guest.
    Reset,
    /// To end: the guest powered off or panicked, or somebody ended QEMU.
    Off,
}

/// A monitor on which a QEMU tells of resets. Nobody else uses it.
#[derive(Debug)]
pub struct ResetMonitor {
    qmp: Qmp,
}

impl ResetMonitor {
    /// Connects to the monitor behind `socket`, of this very process.
    ///
    /// # Errors
    /// Where it does not answer.
    pub fn connect(socket: &Path, process: &ProcessId) -> Result<Self, QmpError> {
        Ok(Self { qmp: Qmp::connect_to(socket, process)? })
    }

    /// Has QEMU stop at the next reset.
    ///
    /// # Errors
    /// Where it does not.
    pub fn hold_next(&mut self) -> Result<(), QmpError> {
        let actions = json!({"reboot": "shutdown", "shutdown": "pause"});
        self.qmp.execute("set-action", actions).map(drop)
    }

    /// Has it do resets itself again, and end when the guest powers off.
    ///
    /// # Errors
    /// Where it does not.
    pub fn hold_none(&mut self) -> Result<(), QmpError> {
        let actions = json!({"reboot": "reset", "shutdown": "poweroff"});
        self.qmp.execute("set-action", actions).map(drop)
    }

    /// Waits for QEMU to stop its guest.
    ///
    /// # Errors
    /// [`QmpError::Closed`] where it has ended.
    pub fn stopped_within(&mut self, time: Duration) -> Result<Option<Stopped>, QmpError> {
        let reason = self.qmp.shutdown_within(time)?;
        Ok(reason.map(|reason| match reason.as_str() {
            "guest-reset" | "host-qmp-system-reset" | "subsystem-reset" => Stopped::Reset,
            _ => Stopped::Off,
        }))
    }

    /// How the guest stands.
    ///
    /// # Errors
    /// Where QEMU does not answer.
    pub fn state(&mut self) -> Result<RunState, QmpError> {
        RunState::of(&mut self.qmp)
    }

    /// Whether QEMU saves or moves the guest just now.
    ///
    /// # Errors
    /// Where it does not answer.
    pub fn is_migrating(&mut self) -> Result<bool, QmpError> {
        is_migrating(&mut self.qmp)
    }

    /// Resets a guest that stands still; it stays so.
    ///
    /// # Errors
    /// Where QEMU does not.
    pub fn reset(&mut self) -> Result<(), QmpError> {
        self.hold_none()?;
        self.qmp.execute("system_reset", json!({})).map(drop)
    }

    /// Lets a guest run that was reset.
    ///
    /// # Errors
    /// Where QEMU does not.
    pub fn let_run(&mut self) -> Result<(), QmpError> {
        let deadline = Instant::now() + RESETS_WITHIN;
        loop {
            match self.state()?.word() {
                "prelaunch" => return self.qmp.execute("cont", json!({})).map(drop),
                // It answers before it has reset the machine.
                "shutdown" if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_micros(500));
                }
                // Somebody else has it in hand.
                _ => return Ok(()),
            }
        }
    }

    /// Has QEMU end, as it would have by itself.
    ///
    /// # Errors
    /// Where it does not answer.
    pub fn quit(&mut self) -> Result<(), QmpError> {
        match self.qmp.execute("quit", json!({})) {
            Err(QmpError::Closed) => Ok(()),
            result => result.map(drop),
        }
    }

    /// Gives a guest that is held empty memory. Returns what it had: files without a name. `reached` hears of each step.
    ///
    /// # Errors
    /// Where that cannot be. What was not exchanged is as it was.
    pub fn set_memory_aside(
        &mut self,
        record: &GuestRecord,
        reached: &dyn Fn(&str),
    ) -> Result<Vec<File>, ResetError> {
        let pid = Pid(record.process.pid);
        let mut aside = Vec::new();
        for (number, ram) in record.ram.iter().enumerate() {
            let old = File::options().read(true).write(true).open(&ram.path);
            let old = old.map_err(file("open", &ram.path))?;
            let next = next_path(&ram.path);
            let new = make_next(&old, ram, &next, number == 0)?;
            reached("made");
            let exchanged = self.exchange(pid, &ram.path, &next, &new);
            if exchanged.is_ok() {
                reached("mapped");
            }
            // Also where it failed half way: the file that QEMU has is the one by that name.
            settle_file(pid, &ram.path)?;
            exchanged?;
            aside.push(old);
        }
        Ok(aside)
    }

    /// Has QEMU use another file in place of the one of a RAM block.
    fn exchange(
        &mut self,
        pid: Pid,
        path: &Path,
        next: &Path,
        new: &File,
    ) -> Result<(), ResetError> {
        let mapped = || ResetError::Mapped { path: path.to_owned() };
        let bytes = new.metadata().map_err(file("look at", next))?.len();
        let range = mapping(pid, path).filter(|it| it.end - it.start == bytes);
        let range = range.ok_or_else(mapped)?;
        let number_of = |path: &Path| {
            Ok::<_, ResetError>(list_fds(pid)?.into_iter().find(|it| it.target == path))
        };
        let own = number_of(path)?.ok_or_else(mapped)?.number;
        self.qmp.execute_with_fd("getfd", json!({"fdname": PASSED}), new.as_fd())?;
        let exchanged = (|| {
            let passed = number_of(next)?.ok_or_else(mapped)?.number;
            map_over_in(pid, &range, passed)?;
            // What QEMU would map, or give back, by that number from now on.
            Ok::<_, ResetError>(duplicate_in(pid, passed, own)?)
        })();
        // By QEMU itself: closed behind its back, the number would be another file's the next time.
        self.qmp.execute("closefd", json!({"fdname": PASSED}))?;
        exchanged
    }
}

/// Puts the names of RAM files right, of which one was being exchanged when who did it died.
///
/// # Errors
/// Where a file cannot be renamed or removed.
pub fn settle(record: &GuestRecord) -> Result<(), ResetError> {
    record.ram.iter().try_for_each(|ram| settle_file(Pid(record.process.pid), &ram.path))
}

fn settle_file(pid: Pid, path: &Path) -> Result<(), ResetError> {
    let next = next_path(path);
    match next.exists() {
        false => Ok(()),
        true if mapping(pid, &next).is_some() => {
            fs::rename(&next, path).map_err(file("rename", &next))
        }
        true => fs::remove_file(&next).map_err(file("remove", &next)),
    }
}

fn next_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".next");
    PathBuf::from(name)
}

/// Makes the file that is to take another one's place, with its owner.
fn make_next(old: &File, ram: &RamFile, next: &Path, has_low: bool) -> Result<File, ResetError> {
    let _ = fs::remove_file(next);
    let mut how = OpenOptions::new();
    let new = how.read(true).write(true).create_new(true).mode(0o600).open(next);
    let new = new.map_err(file("create", next))?;
    let filled = (|| {
        let data = old.metadata()?;
        std::os::unix::fs::fchown(&new, Some(data.uid()), Some(data.gid()))?;
        new.set_len(data.len())?;
        if has_low && ram.bytes >= SHADOW.end {
            let mut shadow = vec![0; (SHADOW.end - SHADOW.start) as usize];
            old.read_exact_at(&mut shadow, SHADOW.start)?;
            new.write_all_at(&shadow, SHADOW.start)?;
        }
        Ok(())
    })();
    filled.map_err(|cause| {
        let _ = fs::remove_file(next);
        file("fill", next)(cause)
    })?;
    Ok(new)
}

/// Where a process has a file mapped: one range, without holes, from the file's beginning on.
fn mapping(pid: Pid, path: &Path) -> Option<Range<u64>> {
    let maps = Process::new(pid.0).ok()?.maps().ok()?;
    let mut whole: Option<Range<u64>> = None;
    for map in maps.into_iter().filter(|map| map.pathname == MMapPath::Path(path.to_owned())) {
        let (start, end) = map.address;
        let begun = whole.get_or_insert(start..start);
        if begun.end != start || map.offset != start - begun.start {
            return None;
        }
        begun.end = end;
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use dewar_kernel::WritableMapping;

    #[test]
    fn a_mapping_is_found_by_its_file() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a b");
        let own = Pid(std::process::id() as i32);
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.expect("file");
        file.set_len(1 << 20).expect("size");
        assert_eq!(mapping(own, &path), None);
        let _mapped = WritableMapping::new(&file, 1 << 20).expect("map");
        let range = mapping(own, &path).expect("mapped");
        assert_eq!(range.end - range.start, 1 << 20);
    }
}
