use crate::inject::Traced;
use crate::{KernelError, Pid};
use std::marker::PhantomData;

/// A thread of another process that stands still, by ptrace(2). It runs on when this value is dropped, or when
/// the thread that holds it ends, however that is.
#[derive(Debug)]
pub struct HeldThread {
    _traced: Traced,
    /// Only the thread that traces another may let it go.
    _stays: PhantomData<*const ()>,
}

impl HeldThread {
    /// Stops a thread; a system call of its that waits is made again later, or ends early, as by a signal that is
    /// ignored.
    ///
    /// # Errors
    /// Where it may not be traced, or is by another.
    pub fn hold(thread: Pid) -> Result<Self, KernelError> {
        Ok(Self { _traced: Traced::stop(thread)?, _stays: PhantomData })
    }
}
