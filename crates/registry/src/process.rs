//! Processes, by more than a number that others may have later.

use dewar_kernel::{Pid, ProcessHandle};
use procfs::ProcError;
use procfs::process::Process;
use serde::{Deserialize, Serialize};
use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A process, told from a later one with the same number by when it started, and in
/// which run of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its number.
    pub pid: i32,
    /// Clock ticks from boot to its start (`/proc/PID/stat`, field 22).
    pub started: u64,
    /// Tells a run of the machine from others (`/proc/sys/kernel/random/boot_id`);
    /// 0 where that was not noted.
    #[serde(default)]
    pub boot: u64,
}

impl ProcessId {
    /// The process that has this number now.
    pub fn of(pid: i32) -> Option<Self> {
        Self::look(pid).ok().flatten()
    }

    /// The same, or that it cannot be seen: for want of descriptors, say.
    fn look(pid: i32) -> Result<Option<Self>, ProcError> {
        let stat = match Process::new(pid).and_then(|process| process.stat()) {
            Ok(stat) => stat,
            // What is hidden from us is somebody else's.
            Err(ProcError::NotFound(_) | ProcError::PermissionDenied(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        // A first thread that is dead says nothing while others are dying:
        // they still hold the files.
        let ended = "ZX".contains(stat.state) && stat.num_threads <= 1;
        Ok((!ended).then_some(Self { pid, started: stat.starttime, boot: this_boot() }))
    }

    /// Whether it still runs. One that cannot be seen may: nothing takes its place.
    pub fn is_alive(&self) -> bool {
        match Self::look(self.pid) {
            Ok(now) => now.is_some_and(|now| now.is_same(self)),
            Err(_) => self.is_of_this_boot(),
        }
    }

    /// Whether it is seen to run.
    pub fn is_seen(&self) -> bool {
        Self::of(self.pid).is_some_and(|now| now.is_same(self))
    }

    /// Whether its end has begun: its first thread is dead, while others still hold its
    /// files.
    pub fn is_ending(&self) -> bool {
        let process = Process::new(self.pid);
        process.and_then(|it| it.stat()).is_ok_and(|stat| "ZX".contains(stat.state))
    }

    /// Whether somebody stopped it (SIGSTOP, a debugger): it is there and does nothing.
    pub fn is_halted(&self) -> bool {
        let stat = Process::new(self.pid).and_then(|process| process.stat());
        stat.is_ok_and(|stat| "Tt".contains(stat.state)) && self.is_seen()
    }

    /// Whether both are one process, as far as is known.
    pub fn is_same(&self, other: &Self) -> bool {
        self.pid == other.pid && self.started == other.started && is_one(self.boot, other.boot)
    }

    /// Whether it may be one of this run of the machine.
    pub fn is_of_this_boot(&self) -> bool {
        is_one(self.boot, this_boot())
    }

    /// Waits up to `time` for its end; says whether it came.
    pub fn ends_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        let pinned = ProcessHandle::open(Pid(self.pid)).ok().filter(|_| self.is_seen());
        if let Some(process) = pinned {
            process.ends_within(time);
        }
        while self.is_alive() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

/// Whether two runs of the machine may be one.
fn is_one(boot: u64, other: u64) -> bool {
    boot == other || boot == 0 || other == 0
}

/// Half of the number that this run of the machine has; 0 where it is not told.
fn this_boot() -> u64 {
    static BOOT: OnceLock<u64> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(16).collect();
        u64::from_str_radix(&digits, 16).unwrap_or(0)
    })
}
