//! Work on several guests in parallel threads, and a gate at which these threads wait for each other.

use std::sync::{Condvar, Mutex, PoisonError};

/// Does `work` for each item, in a thread each; results in order.
pub fn at_once<I: Sync, T: Send>(items: &[I], work: impl Fn(&I) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = items.iter().map(|item| scope.spawn(move || work(item))).collect();
        let results = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        results.collect()
    })
}

/// Where threads wait for each other: all go on together, or none does.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    awaited: usize,
    has_failed: bool,
}

impl Gate {
    /// One that so many threads come to.
    pub fn new(threads: usize) -> Self {
        let state = Mutex::new(GateState { awaited: threads, has_failed: false });
        Self { state, changed: Condvar::new() }
    }

    /// Waits for the others; says whether all came.
    pub fn wait(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.awaited -= 1;
        self.changed.notify_all();
        while state.awaited > 0 && !state.has_failed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.has_failed
    }

    /// One of them will not come; says whether it is the first.
    pub fn fail(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let had_failed = std::mem::replace(&mut state.has_failed, true);
        self.changed.notify_all();
        !had_failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order() {
        assert_eq!(at_once(&[3, 1, 2], |it| it * 2), [6, 2, 4]);
        assert_eq!(at_once(&[] as &[i32], |it| *it), [] as [i32; 0]);
    }

    #[test]
    fn all_go_on_together_or_none_does() {
        let gate = Gate::new(3);
        assert_eq!(at_once(&[0, 1, 2], |_| gate.wait()), [true; 3]);
        let gate = Gate::new(3);
        let came = at_once(&[0, 1, 2], |it| match it {
            0 => !gate.fail(),
            _ => gate.wait(),
        });
        assert_eq!(came, [false; 3]);
    }
}
