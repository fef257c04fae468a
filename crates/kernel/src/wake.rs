use crate::KernelError;
use std::time::Duration;

/// A timer of the kernel's that lets this process go on (SIGCONT) again and again: while it
/// lives nobody can keep the process stopped by SIGSTOP for longer than one period.
///
/// The kernel wakes a stopped process when it *sends* SIGCONT, whatever becomes of the signal
/// (`prepare_signal` in kernel/signal.c; signal(7)). A timer whose signal is ignored may not
/// be armed again (kernel/signal.c since Linux 6.13), and SIGCONT is ignored by default, so
/// it gets a handler that does nothing.
#[derive(Debug)]
pub struct WakeTimer(libc::timer_t);

// SAFETY: the id is a number that the kernel knows; any thread may delete the timer.
unsafe impl Send for WakeTimer {}

extern "C" fn nothing(_: libc::c_int) {}

impl WakeTimer {
    /// Starts it (timer_create(2)).
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn every(period: Duration) -> Result<Self, KernelError> {
        let failed = |operation| KernelError::last(operation, "a timer that wakes us");
        // SAFETY: both structures are plain data of which all zeros is a value; they outlive
        // the calls, which write only to `timer`. The handler is async-signal-safe: it does
        // nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESTART;
            if libc::sigaction(libc::SIGCONT, &raw const action, std::ptr::null_mut()) != 0 {
                return Err(failed("sigaction"));
            }
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_SIGNAL;
            event.sigev_signo = libc::SIGCONT;
            let mut timer: libc::timer_t = std::ptr::null_mut();
            let clock = libc::CLOCK_MONOTONIC;
            if libc::timer_create(clock, &raw mut event, &raw mut timer) != 0 {
                return Err(failed("timer_create"));
            }
            let made = Self(timer);
            let time = libc::timespec {
                tv_sec: period.as_secs() as libc::time_t,
                tv_nsec: period.subsec_nanos().into(),
            };
            let times = libc::itimerspec { it_interval: time, it_value: time };
            match libc::timer_settime(made.0, 0, &raw const times, std::ptr::null_mut()) {
                0 => Ok(made),
                _ => Err(failed("timer_settime")),
            }
        }
    }
}

impl Drop for WakeTimer {
    fn drop(&mut self) {
        // SAFETY: the timer is ours and is not used afterwards.
        unsafe {
            libc::timer_delete(self.0);
        }
    }
}
