//! Whose CPU time it is: a VM's vCPUs, or the busiest threads of a process and of
//! those that it started.

use crate::Owner;
use dewar_kernel::{Task, threads_of};
use std::collections::HashMap;
use std::fs;
use std::time::Duration;

/// How long a process is watched before its busiest threads are chosen.
const WATCH: Duration = Duration::from_millis(100);
/// A thread that uses less of a CPU is not busy.
const BUSY: f64 = 0.02;

/// A guest.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Its name.
    pub name: String,
    /// Its process.
    pub process: Owner,
    /// The threads of a VM's vCPUs; empty for a process or a container: then it is
    /// the busiest of its threads and of those of the processes below it.
    pub vcpus: Vec<Task>,
}

/// How threads fared for a while.
#[derive(Debug)]
pub(super) struct Look {
    /// What those that are held used, in CPUs.
    pub(super) used: f64,
    /// The busiest of a process's other threads, if one is busy.
    pub(super) busiest: Option<Task>,
    /// Those that are held and did not run at all, or have ended.
    pub(super) resting: Vec<Task>,
}

/// What each thread had run, when that was looked at last.
#[derive(Debug, Default)]
pub(super) struct Busy {
    ran: HashMap<Task, Duration>,
}

impl Subject {
    /// The threads to begin with: at least one, at most `count` of a process.
    pub(super) fn first_tasks(&self, busy: &mut Busy, count: usize, period: Duration) -> Vec<Task> {
        if !self.vcpus.is_empty() {
            busy.since_last(self.vcpus.clone());
            return self.vcpus.clone();
        }
        busy.since_last(self.tasks());
        let watch = WATCH.max(period * 2);
        std::thread::sleep(watch);
        let mut found = busy.since_last(self.tasks());
        found.sort_by_key(|(_, ran)| std::cmp::Reverse(*ran));
        let mut tasks: Vec<Task> = found
            .iter()
            .filter(|(_, ran)| ran.div_duration_f64(watch) > BUSY)
            .map(|(task, _)| *task)
            .take(count)
            .collect();
        if tasks.is_empty() {
            let pid = self.process.pid;
            tasks.push(Task { process: pid, thread: pid });
        }
        tasks
    }

    /// A VM's other threads: its disks, its network, its timers.
    pub(super) fn helpers(&self, reserved: &[Task]) -> Vec<Task> {
        match self.vcpus.is_empty() {
            true => Vec::new(),
            false => {
                let mut all = threads_of(self.process.pid);
                all.retain(|task| !reserved.contains(task));
                all
            }
        }
    }

    /// How the threads in `held`, and a process's others, fared since the last look.
    pub(super) fn look(&self, busy: &mut Busy, elapsed: Duration, held: &[Task]) -> Look {
        let tasks = if self.vcpus.is_empty() { self.tasks() } else { held.to_vec() };
        let found = busy.since_last(tasks);
        let share = |ran: &Duration| ran.div_duration_f64(elapsed.max(WATCH));
        let (ours, others): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|(task, _)| held.contains(task));
        let used = ours.iter().map(|(_, ran)| share(ran)).sum();
        let busiest = others.into_iter().max_by_key(|(_, ran)| *ran);
        let busiest = busiest.filter(|(_, ran)| share(ran) > BUSY).map(|(task, _)| task);
        let ran = |task: &&Task| ours.iter().any(|(it, ran)| it == *task && !ran.is_zero());
        let resting = held.iter().filter(|task| !ran(task)).copied().collect();
        Look { used, busiest, resting }
    }

    /// Its processes: the first, and of a container those below it.
    pub(super) fn processes(&self) -> Vec<i32> {
        let mut processes: Vec<i32> = self.tasks().iter().map(|task| task.process).collect();
        processes.sort_unstable();
        processes.dedup();
        processes
    }

    /// All threads of a process and of those that it started, and so on.
    fn tasks(&self) -> Vec<Task> {
        let mut processes = vec![self.process.pid];
        let mut tasks = Vec::new();
        while let Some(process) = processes.pop() {
            for task in threads_of(process) {
                let children = format!("/proc/{process}/task/{}/children", task.thread);
                let children = fs::read_to_string(children).unwrap_or_default();
                processes
                    .extend(children.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
                tasks.push(task);
            }
        }
        tasks
    }
}

impl Busy {
    /// What each thread has run since it was looked at last; of a new one that is
    /// not known.
    fn since_last(&mut self, tasks: Vec<Task>) -> Vec<(Task, Duration)> {
        let now: HashMap<Task, Duration> =
            tasks.into_iter().filter_map(|task| Some((task, task.ran()?))).collect();
        let before = std::mem::replace(&mut self.ran, now);
        let since = |(task, ran): (&Task, &Duration)| {
            (*task, ran.saturating_sub(before.get(task).copied().unwrap_or(*ran)))
        };
        self.ran.iter().map(since).collect()
    }
}
