//! Reservations of other threads, taken and given back.

use dewar_kernel::{Reservation, Scheduling, Task};
use rustix::io::Errno;
use std::process::Command;
use std::time::Duration;

/// Two of them are more than half of what two CPUs can promise.
const MOST: Reservation = Reservation {
    runtime: Duration::from_millis(80),
    period: Duration::from_millis(100),
    reclaim: false,
};

#[test]
fn who_sleeps_when_he_leaves_takes_no_bandwidth_along() {
    let mut sleeper = Command::new("sleep").arg("60").spawn().expect("sleep");
    let pid = sleeper.id() as i32;
    let task = Task { process: pid, thread: pid };
    // In the long run the kernel would have promised all to nobody.
    let results: Vec<_> = (0..10)
        .map(|_| {
            task.reserve(MOST)?;
            std::thread::sleep(Duration::from_millis(120));
            task.schedule(Scheduling::ordinary(0))
        })
        .collect();
    sleeper.kill().expect("kill");
    sleeper.wait().expect("wait");
    let denied = |errno: i32| errno == Errno::PERM.raw_os_error();
    if let Some(Err(error)) = results
        .first()
        .filter(|it| it.as_ref().is_err_and(|error| error.errno().is_some_and(denied)))
    {
        println!("SKIPPED who_sleeps_when_he_leaves_takes_no_bandwidth_along: {error}");
        return;
    }
    for (round, result) in results.into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("round {round}: {error}"));
    }
}
