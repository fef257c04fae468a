//! Reservations of other threads, taken and given back.

use dewar_kernel::{KernelError, Reservation, Scheduling, Task};
use rustix::io::Errno;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

/// Two of them are more than half of what two CPUs can promise.
const MOST: Reservation = Reservation {
    runtime: Duration::from_millis(80),
    period: Duration::from_millis(100),
    reclaim: false,
};

/// There is one sum for the whole machine.
static ALONE: Mutex<()> = Mutex::new(());

/// Takes a reservation and gives it back, asleep, again and again.
fn come_and_go(task: Task) -> Result<(), KernelError> {
    for _ in 0..10 {
        task.reserve(MOST)?;
        std::thread::sleep(Duration::from_millis(120));
        task.schedule(Scheduling::ordinary(0))?;
    }
    Ok(())
}

/// A thread that somebody else takes out of the class while it sleeps leaves its bandwidth behind for good, as far as the
/// kernel knows: who comes next has it all the same.
#[test]
fn what_the_kernel_forgot_to_take_off_is_counted_anew() {
    let name = "what_the_kernel_forgot_to_take_off_is_counted_anew";
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("release");
    let mut numbers = release.split(['.', '-']).map_while(|word| word.parse::<u32>().ok());
    // On older kernels it would be gone until the next boot.
    if (numbers.next(), numbers.next()) < (Some(6), Some(16)) {
        println!("SKIPPED {name}: Linux {release} does not count anew");
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut sleeper = Command::new("sleep").arg("60").spawn().expect("sleep");
    let pid = sleeper.id() as i32;
    let task = Task { process: pid, thread: pid };
    let taken = || -> Result<(), KernelError> {
        for _ in 0..2 * std::thread::available_parallelism().expect("CPUs").get() {
            task.reserve(MOST)?;
            std::thread::sleep(Duration::from_millis(120));
            let mut leave = Command::new("chrt");
            leave.args(["--other", "--pid", "0", &pid.to_string()]);
            assert!(leave.status().expect("chrt").success());
        }
        Ok(())
    };
    let result = taken();
    sleeper.kill().expect("kill");
    sleeper.wait().expect("wait");
    // What is left over is nobody else's trouble.
    std::fs::read_to_string("/proc/sys/kernel/sched_rt_runtime_us").expect("counted anew");
    match result {
        Err(error) if error.errno() == Some(Errno::PERM.raw_os_error()) => {
            println!("SKIPPED {name}: {error}");
        }
        result => result.expect("there is room each time"),
    }
}

#[test]
fn a_sleeping_thread_that_leaves_takes_no_bandwidth_along() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut sleeper = Command::new("sleep").arg("60").spawn().expect("sleep");
    let pid = sleeper.id() as i32;
    let result = come_and_go(Task { process: pid, thread: pid });
    sleeper.kill().expect("kill");
    sleeper.wait().expect("wait");
    match result {
        Err(error) if error.errno() == Some(Errno::PERM.raw_os_error()) => {
            println!("SKIPPED a_sleeping_thread_that_leaves_takes_no_bandwidth_along: {error}");
        }
        // In the long run the kernel would have promised all to nobody.
        result => result.expect("there is room each time"),
    }
}
