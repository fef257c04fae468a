//! One system call, made inside another process, that cannot hurt it.
//!
//! A userfaultfd acts on the memory of the process that makes it, so it must
//! be made inside the guest's process. The usual way (stop a thread, point its
//! registers at a `syscall` instruction, run it, put the registers back) has a
//! moment in which the tracer's death leaves the thread running with our
//! registers: the guest crashes. Here the thread puts *itself* back:
//!
//! 1. The thread is stopped and its registers, vector state and signal mask
//!    are read.
//! 2. Below its stack pointer we write a signal frame that holds all of them,
//!    and above it, as a return address, the C library's signal restorer
//!    (`rt_sigreturn`). Nothing of the thread's own is touched: the frame lies
//!    below the red zone.
//! 3. One `PTRACE_SETREGSET` points the thread at a `syscall; ret` of its own
//!    code, with our arguments, and its stack at that frame. Before this step
//!    nothing has changed; after it the thread does not need us: it makes the call,
//!    returns into the restorer, and the kernel puts back every register as it
//!    does after a signal handler. We may die at any instant.
//! 4. If we live we watch the call's entry and exit to learn its result, and
//!    let go.
//!
//! A signal that arrives in between runs its handler below our frame, as for
//! any other code. A system call that the stop interrupted is made again after
//! the return, as the kernel would have (`ERESTART*`); one with a time limit
//! returns EINTR instead.
//!
//! The two pieces of code are looked for in the process itself (vDSO, C
//! library, loader, program). With a shadow stack the `ret` would be refused:
//! such a process is refused before it is touched.
//!
//! **Filters.** A filter of system calls (seccomp(2)) may end a process for the call, or for the return from a
//! signal. [`inject_past_filter`] lifts it from the thread for as long as we trace it, as CRIU does for its own code,
//! and puts the registers back itself, so that no `rt_sigreturn` follows. If we are killed in the microseconds
//! between step 3 and that, the filter has its say over both calls.

mod frame;
mod gadget;
mod trace;

use crate::{KernelError, Pid};
use gadget::Gadgets;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use trace::Registers;
pub(crate) use trace::Traced;

/// What came of an injected call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Injection {
    /// What the call returned: a negative error number where it failed.
    pub result: i64,
    /// How long the process's main thread was stopped.
    pub stopped: std::time::Duration,
}

/// Makes one system call in the main thread of `pid`.
///
/// # Errors
/// Where the process cannot be traced, lacks the code that is needed, or has a
/// shadow stack; it runs on unchanged. What the call itself answers is in
/// [`Injection::result`].
pub fn inject_syscall(
    pid: Pid,
    number: u64,
    arguments: [u64; 3],
) -> Result<Injection, KernelError> {
    inject(pid, number, six(arguments), Filter::Stays)
}

/// The same, in a process that may be under a filter of system calls: it has no say.
///
/// # Errors
/// As [`inject_syscall`], and where the filter cannot be lifted (that takes `CAP_SYS_ADMIN`).
pub fn inject_past_filter(
    pid: Pid,
    number: u64,
    arguments: [u64; 3],
) -> Result<Injection, KernelError> {
    inject_six_past_filter(pid, number, six(arguments))
}

/// The same with as many arguments as a system call can have.
///
/// # Errors
/// As [`inject_past_filter`].
pub(crate) fn inject_six_past_filter(
    pid: Pid,
    number: u64,
    arguments: [u64; 6],
) -> Result<Injection, KernelError> {
    let filter = if is_filtered(pid) { Filter::Lifted } else { Filter::Stays };
    inject(pid, number, arguments, filter)
}

fn six([first, second, third]: [u64; 3]) -> [u64; 6] {
    [first, second, third, 0, 0, 0]
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Filter {
    Stays,
    Lifted,
}

fn inject(
    pid: Pid,
    number: u64,
    arguments: [u64; 6],
    filter: Filter,
) -> Result<Injection, KernelError> {
    let failed = |operation, cause| KernelError::new(operation, pid.to_string(), cause);
    let other = |text: &str| io::Error::other(text.to_owned());
    if has_shadow_stack(pid) {
        return Err(failed("inject", other("it runs with a shadow stack")));
    }
    let gadgets = Gadgets::find(pid).map_err(|cause| failed("inject", cause))?;
    let memory = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{}/mem", pid.0))
        .map_err(|cause| failed("open", cause))?;

    let began = std::time::Instant::now();
    let thread = match filter {
        Filter::Stays => Traced::stop(pid)?,
        Filter::Lifted => Traced::stop_without_filter(pid)?,
    };
    let before = thread.registers()?;
    let vector_state = thread.vector_state()?;
    let mask = thread.signal_mask()?;

    let resumed = frame::resumed_after_restart(&before);
    let built = frame::build(&resumed, &vector_state, mask, gadgets.restorer)
        .map_err(|cause| failed("inject", cause))?;
    memory.write_all_at(&built.bytes, built.address).map_err(|cause| failed("write", cause))?;

    let call = Registers {
        rip: gadgets.syscall,
        rsp: built.address,
        rax: number,
        orig_rax: u64::MAX,
        rdi: arguments[0],
        rsi: arguments[1],
        rdx: arguments[2],
        r10: arguments[3],
        r8: arguments[4],
        r9: arguments[5],
        eflags: before.eflags & !DIRECTION_FLAG,
        ..before
    };
    thread.set_registers(&call)?;
    let result = thread.watch_call(gadgets.syscall + SYSCALL_BYTES)?;
    if filter == Filter::Lifted {
        thread.set_registers(&resumed)?;
    }
    drop(thread);
    Ok(Injection { result, stopped: began.elapsed() })
}

const DIRECTION_FLAG: u64 = 1 << 10;
const SYSCALL_BYTES: u64 = 2;

fn has_shadow_stack(pid: Pid) -> bool {
    status(pid, "x86_Thread_features:").is_some_and(|features| features.contains("shstk"))
}

/// Whether the main thread is under a filter of system calls, as far as can be seen.
fn is_filtered(pid: Pid) -> bool {
    status(pid, "Seccomp:").is_none_or(|mode| mode != "0")
}

/// A line of proc_pid_status(5).
fn status(pid: Pid, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{}/status", pid.0)).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)).map(|value| value.trim().to_owned())
}
