//! How threads get out of a reservation, from what was written down of them alone.

use super::limits::{HELPERS_NICE, LEAVES_WITHIN, RESCUE_PRIORITY, ROOM_AGAIN};
use crate::entry::{Entry, SavedTask};
use dewar_kernel::{Scheduling, Task, threads_of};
use std::time::Instant;

/// Schedules a guest's threads as they were before; those that have ended need
/// nothing. One that the guest made since got what the thread has that made it.
pub fn release(entry: &Entry) {
    entry.saved.iter().for_each(as_it_was);
    let Some(nice) = entry.helpers_nice().filter(|_| entry.process.is_seen()) else { return };
    let known: Vec<Task> = entry.saved.iter().map(SavedTask::task).collect();
    let raised = Scheduling::ordinary(HELPERS_NICE);
    for task in threads_of(entry.process.pid).into_iter().filter(|task| !known.contains(task)) {
        if task.scheduling().is_ok_and(|how| how == raised) {
            let _ = task.schedule(Scheduling::ordinary(nice));
        }
    }
}

/// Ends the rescues of a guest whose controller does not: somebody stopped it. It makes
/// its threads what they should be when it goes on.
pub fn end_rescues(entry: &Entry) {
    let rescued =
        |task: &Task| task.scheduling().is_ok_and(|how| how == Scheduling::ahead(RESCUE_PRIORITY));
    for saved in entry.saved.iter().filter(|task| task.is_there() && rescued(&task.task())) {
        as_it_was(saved);
    }
}

/// One that had a reservation of its own may have to wait until the kernel has ours back.
/// Where it cannot have it, it is an ordinary thread: never ahead of all others for ever.
fn as_it_was(saved: &SavedTask) {
    let began = Instant::now();
    while saved.is_there() && saved.task().schedule(saved.scheduling()).is_err() {
        if began.elapsed() >= LEAVES_WITHIN {
            let _ = saved.task().schedule(Scheduling::ordinary(0));
            return;
        }
        std::thread::sleep(ROOM_AGAIN);
    }
}
