//! Reservations of other threads, taken and given back.

use dewar_kernel::{KernelError, Reservation, Scheduling, Task};
use rustix::io::Errno;
use std::process::Command;
use std::time::Duration;

/// Two of them are more than half of what two CPUs can promise.
const MOST: Reservation = Reservation {
    runtime: Duration::from_millis(80),
    period: Duration::from_millis(100),
    reclaim: false,
};

/// Takes a reservation and gives it back, asleep, again and again.
fn come_and_go(task: Task) -> Result<(), KernelError> {
    for _ in 0..10 {
        task.reserve(MOST)?;
        std::thread::sleep(Duration::from_millis(120));
        task.schedule(Scheduling::ordinary(0))?;
    }
    Ok(())
}

#[test]
fn who_sleeps_when_he_leaves_takes_no_bandwidth_along() {
    let mut sleeper = Command::new("sleep").arg("60").spawn().expect("sleep");
    let pid = sleeper.id() as i32;
    let result = come_and_go(Task { process: pid, thread: pid });
    sleeper.kill().expect("kill");
    sleeper.wait().expect("wait");
    match result {
        Err(error) if error.errno() == Some(Errno::PERM.raw_os_error()) => {
            println!("SKIPPED who_sleeps_when_he_leaves_takes_no_bandwidth_along: {error}");
        }
        // In the long run the kernel would have promised all to nobody.
        result => result.expect("there is room each time"),
    }
}
