//! How much CPU time this process may take beside others, as a nice value of its session.
//!
//! Where sessions are the scheduler's groups (autogroup), CPU time is shared among sessions first, and idle
//! priority counts within one session only. So a capture lowers the weight of its own session:
//!
//! | nice | when |
//! |--:|---|
//! | 19 | idle-priority threads are at work |
//! | 5 | they are, and some got no CPU time for too long |
//! | 0 | no such thread is at work, or other processes wait for this one |
//!
//! Without a session of its own, or the right to set its weight, the work is done at the usual weight.

use dewar_kernel::OwnSession;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// 1.5 % of what a session at 0 has (weights 15 and 1024, kernel/sched/core.c).
const IDLE: i32 = 19;
/// A third of it (weight 335).
pub(crate) const STARVED: i32 = 5;

/// The weight. It follows from who is about.
#[derive(Debug, Default)]
pub(crate) struct Weight {
    session: Option<OwnSession>,
    now: Mutex<About>,
}

#[derive(Debug, Default)]
struct About {
    working: usize,
    awaited: usize,
    starved: bool,
    nice: i32,
}

/// While it lives, idle threads work, or other processes wait for this one.
#[must_use]
#[derive(Debug)]
pub struct Presence<'w>(&'w Weight, fn(&mut About) -> &mut usize);

impl Weight {
    pub(crate) fn of(session: Option<OwnSession>) -> Self {
        Self { session, now: Mutex::default() }
    }

    /// Idle threads are at work.
    pub(crate) fn working(&self) -> Presence<'_> {
        Presence::begin(self, |about| &mut about.working)
    }

    /// Others wait for this process.
    pub(crate) fn awaited(&self) -> Presence<'_> {
        Presence::begin(self, |about| &mut about.awaited)
    }

    /// Some of those at work had hardly any time.
    pub(crate) fn starved(&self) {
        let mut about = self.lock();
        about.starved = true;
        self.set(&mut about);
    }

    fn lock(&self) -> MutexGuard<'_, About> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, about: &mut About) {
        let nice = match about {
            About { working: 0, .. } | About { awaited: 1.., .. } => 0,
            About { starved: true, .. } => STARVED,
            About { .. } => IDLE,
        };
        if nice != about.nice {
            about.nice = nice;
            let _ = self.session.as_ref().map(|session| session.make_nice(nice));
        }
    }
}

impl<'w> Presence<'w> {
    fn begin(weight: &'w Weight, count: fn(&mut About) -> &mut usize) -> Self {
        let mut about = weight.lock();
        *count(&mut about) += 1;
        weight.set(&mut about);
        Self(weight, count)
    }
}

impl Drop for Presence<'_> {
    fn drop(&mut self) {
        let mut about = self.0.lock();
        *self.1(&mut about) -= 1;
        self.0.set(&mut about);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_from_who_is_about() {
        let weight = Weight::default();
        let nice = || weight.lock().nice;
        assert_eq!(nice(), 0);
        let pass = weight.working();
        assert_eq!(nice(), 19);
        let beside = weight.working();
        {
            let _awaited = weight.awaited();
            assert_eq!(nice(), 0, "somebody waits");
        }
        assert_eq!(nice(), 19);
        drop(beside);
        assert_eq!(nice(), 19, "the other still works");
        weight.starved();
        assert_eq!(nice(), 5);
        drop(pass);
        assert_eq!(nice(), 0);
        // It is known by now that others want all CPUs.
        let behind = weight.working();
        assert_eq!(nice(), 5);
        let awaited = weight.awaited();
        drop(behind);
        assert_eq!(nice(), 0);
        drop(awaited);
        assert_eq!(nice(), 0);
    }
}
