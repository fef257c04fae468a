//! How threads get out of a reservation, from what was written down of them alone.

use super::{HELPERS_NICE, RESCUE_PRIORITY};
use crate::{Entry, SavedTask};
use dewar_kernel::{Scheduling, Task, threads_of};

/// Schedules a guest's threads as they were before; those that have ended need
/// nothing. One that the guest made since got what the thread has that made it.
pub fn give_back(entry: &Entry) {
    for task in entry.saved.iter().filter(|task| task.is_there()) {
        let _ = task.task().schedule(task.scheduling());
    }
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
        let _ = saved.task().schedule(saved.scheduling());
    }
}
