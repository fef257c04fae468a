use crate::KernelError;

/// Puts the calling thread under `SCHED_IDLE`: it runs only where nobody else
/// wants the CPU, so a guest does not feel it (sched(7)).
///
/// # Errors
/// Where the kernel refuses.
pub fn make_thread_idle() -> Result<(), KernelError> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: pid 0 is the calling thread; the parameter block outlives the call.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameters) };
    if result != 0 {
        return Err(KernelError::last("sched_setscheduler", "this thread"));
    }
    Ok(())
}
