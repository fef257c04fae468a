//! What a controller does once a second: new threads, and the ledger.

use super::Controller;
use crate::SavedTask;
use crate::ledger_writer::Ticket;
use dewar_kernel::Task;
use std::time::{Duration, Instant};

/// For so long a thread does not run that has no jobs; or for so many periods.
const RESTS: Duration = Duration::from_secs(3);
const REST_PERIODS: u32 = 4;

impl Controller {
    /// Once a second: new threads, and the ledger.
    pub(super) fn publish(&mut self) {
        let elapsed = self.published.elapsed();
        self.published = Instant::now();
        self.take_what_came();
        let tasks: Vec<Task> = self.hold.tasks().collect();
        let look = self.subject.look(&mut self.busy, elapsed, &tasks);
        let helpers = self.subject.helpers(&tasks);
        self.entry.seen.recent = std::mem::take(&mut self.since_published);
        self.entry.seen.reserved = self.hold.share();
        self.entry.seen.used = look.used;
        self.note_demand();
        self.entry.seen.ignored = self.heartbeats.ignored();
        self.entry.seen.heard = self.entry.seen.recent.0 > 0;
        self.hold.raise_helpers(&helpers);
        self.count_rests(&tasks, &look.resting, elapsed);
        let may = self.coming.is_none() && !self.hold.any_is_rescued();
        match look.busiest.filter(|_| may) {
            Some(task) if tasks.len() < self.target.promise.threads => self.announce(task),
            Some(_) => {
                self.let_go_of_who_rests();
                self.write_down();
            }
            None => drop(self.write_down()),
        }
    }

    /// Where no job's was known, what was known before holds.
    fn note_demand(&mut self) {
        let most = self.counted.iter_mut().map(|it| std::mem::take(&mut it.most));
        let demand = most.sum::<Duration>().div_duration_f64(self.target.promise.period());
        if demand > 0.0 {
            self.entry.seen.demand = demand;
        }
    }

    /// Counts only while jobs are done: a program that makes a pause goes on with the
    /// same threads.
    fn count_rests(&mut self, tasks: &[Task], resting: &[Task], elapsed: Duration) {
        for (task, counted) in tasks.iter().zip(&mut self.counted) {
            if !resting.contains(task) {
                counted.rested = Duration::ZERO;
            } else if self.entry.seen.heard {
                counted.rested += elapsed;
            }
        }
    }

    /// Makes room for a thread that is busy: of a process it is a guess which has the
    /// jobs, and one that has not run for long while they were done has none.
    fn let_go_of_who_rests(&mut self) {
        let long = RESTS.max(self.target.promise.period() * REST_PERIODS);
        let Some(index) = self.counted.iter().position(|it| it.rested >= long) else { return };
        let task = self.hold.tasks().nth(index);
        let is_it = |saved: &SavedTask| Some(saved.task()) == task;
        let Some(at) = self.entry.saved.iter().position(is_it) else { return };
        // As it was, before nobody knows how that is.
        let saved = self.entry.saved[at];
        if !saved.is_there() || saved.task().schedule(saved.scheduling()).is_ok() {
            self.entry.saved.remove(at);
            self.forget(index);
        }
    }

    fn write_down(&mut self) -> Option<Ticket> {
        self.ledger_writer.as_mut()?.post(&self.entry)
    }

    /// Has it written down how one more thread is scheduled, unless it is somebody
    /// else's; it is touched when it is on the disk.
    fn announce(&mut self, task: Task) {
        let is_taken = self.ledger.entries().iter().any(|entry| entry.has_any(&[task]));
        let Some(saved) = SavedTask::of(task).filter(|_| !is_taken) else { return };
        self.entry.saved.push(saved);
        match self.write_down() {
            Some(ticket) => self.coming = Some((saved, ticket)),
            None => drop(self.entry.saved.pop()),
        }
    }

    /// Takes hold of a thread that was announced, unless the kernel refuses.
    fn take_what_came(&mut self) {
        let written = |ticket| self.ledger_writer.as_ref().is_some_and(|it| it.has_written(ticket));
        let Some((saved, _)) = self.coming.take_if(|(_, ticket)| written(*ticket)) else { return };
        // It may have ended, and its number be another's.
        if saved.is_there() && self.hold.add(saved.task()) {
            self.expect(saved.task());
            self.next = None;
        } else {
            self.entry.saved.retain(|it| *it != saved);
        }
    }
}
