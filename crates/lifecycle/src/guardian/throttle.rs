//! Slows a guest down: its vCPUs' threads stand still for a share of each period.
//!
//! The guardian does it and not the command: a command that is stopped by a signal could leave the guest where
//! it stands. The guardian lets the threads run when its command says nothing for a while; if it ends itself, the
//! kernel lets them go.

use dewar_kernel::{Pid, ThreadHolder};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

const PERIOD: Duration = Duration::from_millis(10);
/// How long it is waited until they run. They do at once, unless this process has no CPU.
const RUN_WITHIN: Duration = Duration::from_millis(100);
/// How often it is looked whether one has stopped that was to stop before.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// What is to be slowed down, and by how much.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Share {
    /// Hundredths of the time in which they stand still; 0 ends it.
    pub percent: u8,
    /// Of which process.
    pub process: i32,
    /// Its threads.
    pub threads: Vec<i32>,
}

/// Dropped, it lets them run.
#[derive(Default)]
pub(super) struct Throttle {
    shared: Arc<Shared>,
    /// What the command wants; less is done while it is silent.
    wanted: Share,
    has_worker: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    share: Share,
    are_held: bool,
    has_ended: bool,
}

impl Throttle {
    /// Whether anything is slowed down, or would be if the command were not silent.
    pub fn is_on(&self) -> bool {
        self.wanted.percent > 0
    }

    /// Does this from now on. Where that is nothing, all of them run when this returns.
    pub fn set(&mut self, share: Share) {
        self.wanted = share;
        if self.is_on() && !self.has_worker {
            let shared = Arc::clone(&self.shared);
            self.has_worker = Builder::new().spawn(move || slow_down(&shared)).is_ok();
        }
        self.act(self.wanted.clone());
    }

    /// Lets them run while the command is silent.
    pub fn rest(&self) {
        self.act(Share::default());
    }

    /// Does what is wanted again.
    pub fn again(&self) {
        if self.is_on() {
            self.act(self.wanted.clone());
        }
    }

    fn act(&self, share: Share) {
        let mut state = self.shared.lock();
        if state.share == share {
            return;
        }
        let is_over = share.percent == 0;
        state.share = share;
        self.shared.changed.notify_all();
        if is_over {
            let held = |state: &mut State| state.are_held;
            let _ = self.shared.changed.wait_timeout_while(state, RUN_WITHIN, held);
        }
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.rest();
        self.shared.lock().has_ended = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits so long, or until another share is wanted.
    fn pause<'s>(
        &'s self,
        state: MutexGuard<'s, State>,
        share: &Share,
        percent: u8,
    ) -> MutexGuard<'s, State> {
        let time = PERIOD * u32::from(percent) / 100;
        let same = |state: &mut State| state.share == *share && !state.has_ended;
        let waited = self.changed.wait_timeout_while(state, time, same);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn slow_down(shared: &Shared) {
    let mut holder = ThreadHolder::default();
    let mut state = shared.lock();
    loop {
        let idle = |state: &mut State| state.share.percent == 0 && !state.has_ended;
        // One that was asked to stop, and was too busy to, does yet, and would stay so.
        while idle(&mut state) && holder.release_late() {
            let waited = shared.changed.wait_timeout(state, LOOK_EVERY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state = shared.changed.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
        if state.has_ended {
            return;
        }
        let share = state.share.clone();
        let percent = share.percent.min(99);
        state.are_held = true;
        drop(state);
        let held = holder.hold(Pid(share.process), &share.threads, PERIOD);
        state = shared.pause(shared.lock(), &share, percent);
        drop(held);
        state.are_held = false;
        shared.changed.notify_all();
        state = shared.pause(state, &share, 100 - percent);
    }
}

#[cfg(test)]
mod tests {
    use super::{Share, Throttle};
    use std::process::Command;
    use std::time::{Duration, Instant};

    /// A process that waits for its child in vfork(2) stops only when the child has ended: after 300 ms.
    #[test]
    fn what_stops_too_late_is_let_go() {
        let waits =
            "if (syscall(58) == 0) { select(undef, undef, undef, 3); syscall(60, 0) } sleep 60";
        let mut child = Command::new("perl").args(["-e", waits]).spawn().expect("perl");
        let process = child.id() as i32;
        let state = || {
            let stat =
                std::fs::read_to_string(format!("/proc/{process}/stat")).expect("it is there");
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).expect("a state")
        };
        let until = |wanted: &dyn Fn(char) -> bool| {
            let deadline = Instant::now() + Duration::from_secs(10);
            while !wanted(state()) {
                assert!(Instant::now() < deadline, "it is {}", state());
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        until(&|state| state == 'D');
        let mut throttle = Throttle::default();
        throttle.set(Share { percent: 50, process, threads: vec![process] });
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(state(), 'D', "it stopped at once");
        throttle.rest();
        until(&|state| state != 'D');
        std::thread::sleep(Duration::from_millis(200));
        assert!(!"tT".contains(state()), "it stands still");
        drop(throttle);
        let _ = child.kill();
        child.wait().expect("wait");
    }
}
