//! How other processes' threads are scheduled: `sched_setattr(2)`, and what a
//! thread has run.
//!
//! What the kernel does that its manual does not say (seen on 6.18):
//! - A larger runtime holds from the next period on; neither it nor leaving the
//!   class and coming back fills up the present one.
//! - A thread that leaves SCHED_DEADLINE keeps its bandwidth until its deadline; to come back
//!   before that it needs room for both. A thread that has slept for a while when it leaves keeps
//!   the bandwidth for ever: the timer that takes it off is set when the thread falls asleep, and
//!   works only if the thread left before the timer comes. No thread can have that bandwidth until
//!   scheduling domains are built anew. So the reservation of a sleeping thread is made as small as
//!   can be before the thread leaves.
//! - A thread that leaves with its runtime exhausted and comes back too early never runs again.
//!   Too early is: after its deadline, but before its overrun is worked off (deadline + overrun *
//!   period / runtime). The timer that gives it a new runtime came while the thread was not in
//!   the class. Leaving the class once more mends that.
//! - The bandwidth of a thread that wants to run and is killed, or leaves and is killed, is now and then taken off
//!   twice, or never. Where the sum falls below nothing, a small reservation is refused and a large one is not.
//! - Reading `sched_rt_runtime_us` builds scheduling domains anew, and what is promised is counted anew
//!   (6.16 and later). So a refusal is believed only after that.
//! - The run time in `schedstat` is exact for a thread that does not run. For one
//!   that does it may be old by several ticks.

use crate::KernelError;
use std::fs;
use std::io;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A thread of any process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    /// The process.
    pub process: i32,
    /// The thread.
    pub thread: i32,
}

/// CPU time that a thread is promised (`SCHED_DEADLINE`): so much `runtime` in each
/// `period`, at any time within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reservation {
    /// At least 1,024 ns.
    pub runtime: Duration,
    /// Not below `runtime`.
    pub period: Duration,
    /// Whether it may take what others have reserved and do not use
    /// (`SCHED_FLAG_RECLAIM`, GRUB).
    pub reclaim: bool,
}

/// How a thread is scheduled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheduling {
    /// `SCHED_OTHER` and so on, by its number (sched(7)).
    pub policy: u32,
    /// Among ordinary threads: -20 to 19.
    pub nice: i32,
    /// Among real-time threads.
    pub priority: u32,
    /// Where it is a `SCHED_DEADLINE` thread.
    pub reservation: Option<Reservation>,
    /// Whether what it makes is ordinary, whatever it is.
    pub resets_on_fork: bool,
}

/// `struct sched_attr`, version 0 (include/uapi/linux/sched/types.h).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const DEADLINE: u32 = 6;
/// Threads and processes that it makes are ordinary ones; without it the kernel
/// does not let a thread in this class make any.
const RESET_ON_FORK: u64 = 1;
const RECLAIM: u64 = 2;
/// To count anew, the kernel builds its scheduling domains anew.
const COUNTED_ANEW_EVERY: Duration = Duration::from_secs(10);
/// So little of a CPU that the kernel counts it as nothing: the shortest runtime in
/// about the longest period (`sched_deadline_period_max_us`).
const NOTHING: Reservation = Reservation {
    runtime: Duration::from_nanos(1024),
    period: Duration::from_secs(4),
    reclaim: false,
};

impl Scheduling {
    /// An ordinary thread.
    pub fn ordinary(nice: i32) -> Self {
        Self {
            policy: libc::SCHED_OTHER as u32,
            nice,
            priority: 0,
            reservation: None,
            resets_on_fork: false,
        }
    }

    /// One that goes before all ordinary ones (`SCHED_FIFO`, lowest is 1), but after
    /// all that have reservations. What it makes is ordinary.
    pub fn ahead(priority: u32) -> Self {
        let policy = libc::SCHED_FIFO as u32;
        Self { policy, nice: 0, priority, reservation: None, resets_on_fork: true }
    }
}

impl Task {
    /// Promises it CPU time. A thread that it makes is not promised any.
    ///
    /// # Errors
    /// EBUSY where that is more than may be promised, EPERM without
    /// `CAP_SYS_NICE` or where the thread may not run on all CPUs.
    pub fn reserve(self, reservation: Reservation) -> Result<(), KernelError> {
        let nanoseconds = |time: Duration| time.as_nanos() as u64;
        let attributes = Attributes {
            policy: DEADLINE,
            flags: RESET_ON_FORK | if reservation.reclaim { RECLAIM } else { 0 },
            runtime: nanoseconds(reservation.runtime),
            deadline: nanoseconds(reservation.period),
            period: nanoseconds(reservation.period),
            ..Attributes::default()
        };
        match self.set(attributes) {
            Err(error) if error.errno() == Some(libc::EBUSY) && bandwidth_counted_anew() => {
                self.set(attributes)
            }
            result => result,
        }
    }

    /// Schedules it as it was before.
    ///
    /// # Errors
    /// Where the kernel refuses; where it has ended.
    pub fn schedule(self, how: Scheduling) -> Result<(), KernelError> {
        if let Some(reservation) = how.reservation {
            return self.reserve(reservation);
        }
        let is_reserved = self.scheduling().is_ok_and(|now| now.policy == DEADLINE);
        if is_reserved && !self.is_runnable() {
            // Where this fails it leaves all the same.
            let _ = self.reserve(NOTHING);
        }
        self.set(Attributes {
            policy: how.policy,
            flags: if how.resets_on_fork { RESET_ON_FORK } else { 0 },
            nice: how.nice,
            priority: how.priority,
            ..Attributes::default()
        })
    }

    /// How it is scheduled.
    ///
    /// # Errors
    /// Where it has ended.
    pub fn scheduling(self) -> Result<Scheduling, KernelError> {
        let mut found = Attributes::default();
        // SAFETY: the kernel writes at most the given size, which is that of the
        // block; the block outlives the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_sched_getattr,
                self.thread,
                &raw mut found,
                size_of::<Attributes>() as u32,
                0,
            )
        };
        if result != 0 {
            return Err(KernelError::last("sched_getattr", self.describe()));
        }
        let reservation = (found.policy == DEADLINE).then(|| Reservation {
            runtime: Duration::from_nanos(found.runtime),
            period: Duration::from_nanos(found.period),
            reclaim: found.flags & RECLAIM != 0,
        });
        let Attributes { policy, nice, priority, flags, .. } = found;
        let resets_on_fork = flags & RESET_ON_FORK != 0;
        Ok(Scheduling { policy, nice, priority, reservation, resets_on_fork })
    }

    /// The CPU time that it has had; `None` where it has ended.
    pub fn ran(self) -> Option<Duration> {
        let stat = fs::read_to_string(self.file("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
    }

    /// When it was made, in clock ticks from boot (`/proc/PID/task/TID/stat`, field 22):
    /// tells it from a later one with its number. `None` where it has ended.
    pub fn started(self) -> Option<u64> {
        let stat = fs::read_to_string(self.file("stat")).ok()?;
        let (_, rest) = stat.rsplit_once(") ")?;
        rest.split(' ').nth(19)?.parse().ok()
    }

    /// Whether it runs or wants to, rather than wait for something; one that has
    /// used up its reservation does.
    pub fn is_runnable(self) -> bool {
        self.state() == Some('R')
    }

    /// Its state, as `/proc/PID/task/TID/stat` tells it; `None` where it has ended.
    pub(crate) fn state(self) -> Option<char> {
        let stat = fs::read_to_string(self.file("stat")).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    }

    fn set(self, attributes: Attributes) -> Result<(), KernelError> {
        // A number that came to mean another process's thread is left alone.
        if self.ran().is_none() {
            let gone = io::Error::from_raw_os_error(libc::ESRCH);
            return Err(KernelError::new("sched_setattr", self.describe(), gone));
        }
        let attributes = Attributes { size: size_of::<Attributes>() as u32, ..attributes };
        // SAFETY: the kernel reads a block of the size that stands in it, which
        // outlives the call.
        let result = unsafe {
            libc::syscall(libc::SYS_sched_setattr, self.thread, &raw const attributes, 0)
        };
        if result != 0 {
            return Err(KernelError::last("sched_setattr", self.describe()));
        }
        Ok(())
    }

    fn file(self, name: &str) -> String {
        format!("/proc/{}/task/{}/{name}", self.process, self.thread)
    }

    fn describe(self) -> String {
        format!("thread {} of process {}", self.thread, self.process)
    }
}

/// All threads of programs that are under a reservation now, of Dewar or of others. Those of
/// the kernel itself (`schedutil`'s) are not told.
pub fn reserved_tasks() -> Vec<Task> {
    /// `PF_KTHREAD` in include/linux/sched.h; field 9 of proc_pid_stat(5).
    const OF_THE_KERNEL: u64 = 0x0020_0000;
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|it| it.file_name().to_str()?.parse::<i32>().ok());
    let is_program = |process: &i32| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let flags = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(6));
        flags.and_then(|it| it.parse::<u64>().ok()).is_some_and(|it| it & OF_THE_KERNEL == 0)
    };
    let is_reserved = |task: &Task| task.scheduling().is_ok_and(|how| how.reservation.is_some());
    numbers.filter(is_program).flat_map(threads_of).filter(is_reserved).collect()
}

/// The threads of a process; none where it has ended.
pub fn threads_of(process: i32) -> Vec<Task> {
    let entries = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let thread = entry.file_name().to_str()?.parse().ok()?;
            Some(Task { process, thread })
        })
        .collect()
}

/// How many CPUs' time the kernel lets `SCHED_DEADLINE` threads have in all:
/// `sched_rt_runtime_us` of `sched_rt_period_us` of each CPU, less the 5 % that
/// Linux 6.12 and later keep for ordinary threads. Asked once: the kernel builds its
/// scheduling domains anew each time.
pub fn deadline_limit() -> f64 {
    static LIMIT: OnceLock<f64> = OnceLock::new();
    *LIMIT.get_or_init(read_deadline_limit)
}

/// Has the kernel count anew what it has promised, unless it did a moment ago; false where it did.
fn bandwidth_counted_anew() -> bool {
    static LAST: Mutex<Option<Instant>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    if last.is_some_and(|last| now - last < COUNTED_ANEW_EVERY) {
        return false;
    }
    *last = Some(now);
    fs::read_to_string("/proc/sys/kernel/sched_rt_runtime_us").is_ok()
}

fn read_deadline_limit() -> f64 {
    let read = |name: &str| -> Option<f64> {
        fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?.trim().parse().ok()
    };
    let cpus = f64::from(online_cpus());
    let share = match (read("sched_rt_runtime_us"), read("sched_rt_period_us")) {
        (Some(runtime), Some(period)) if runtime >= 0.0 && period > 0.0 => runtime / period,
        _ => 1.0,
    };
    let kept = if kernel_at_least(6, 12) { 0.05 } else { 0.0 };
    cpus * (share - kept)
}

/// The CPUs of the machine, whichever of them this process may use
/// (Documentation/ABI/testing/sysfs-devices-system-cpu).
fn online_cpus() -> u32 {
    let list = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<u32>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    list.trim().split(',').filter_map(count).sum::<u32>().max(1)
}

fn kernel_at_least(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|word| word.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
}
