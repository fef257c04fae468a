//! What a controller does once a second: new threads, and the ledger.

use super::Controller;
use crate::SavedTask;
use crate::scribe::Ticket;
use dewar_kernel::Task;
use std::time::Instant;

impl Controller {
    /// Once a second: new threads, and the ledger.
    pub(super) fn tell(&mut self) {
        let elapsed = self.told.elapsed();
        self.told = Instant::now();
        self.take_what_came();
        let tasks: Vec<Task> = self.hold.tasks().collect();
        let (used, busiest) = self.subject.busiest(&mut self.busy, elapsed, &tasks);
        let helpers = self.subject.helpers(&tasks);
        self.entry.seen.recent = std::mem::take(&mut self.since_told);
        self.entry.seen.reserved = self.hold.share();
        self.entry.seen.used = used;
        self.entry.seen.ignored = self.heartbeats.ignored();
        self.entry.seen.heard = self.entry.seen.recent.0 > 0;
        self.hold.raise_helpers(&helpers);
        let has_room = tasks.len() < self.target.promise.threads && self.coming.is_none();
        if let Some(task) = busiest.filter(|_| has_room && !self.hold.any_is_rescued()) {
            self.announce(task);
        } else {
            self.write_down();
        }
    }

    fn write_down(&mut self) -> Option<Ticket> {
        self.scribe.as_mut()?.post(&self.entry)
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
        let written = |ticket| self.scribe.as_ref().is_some_and(|it| it.has_written(ticket));
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
