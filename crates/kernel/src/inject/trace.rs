//! A stopped thread, by ptrace(2). It runs on when this value is dropped, or
//! when we die.

use crate::{KernelError, Pid};
use std::io;
use std::ptr;

pub(super) use libc::user_regs_struct as Registers;

const NT_PRSTATUS: usize = 1;
const NT_X86_XSTATE: usize = 0x202;
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
/// Room for every state component there is.
const MOST_VECTOR_BYTES: usize = 64 << 10;
const SYSCALL_STOP: i32 = libc::SIGTRAP | 0x80;
/// The thread's filters of system calls (seccomp(2)) do nothing while we trace it. Needs `CAP_SYS_ADMIN`, and no
/// filter over ourselves.
const PTRACE_O_SUSPEND_SECCOMP: i32 = 1 << 21;

/// A thread, seized and stopped.
#[derive(Debug)]
pub(crate) struct Traced {
    pid: Pid,
}

impl Traced {
    pub(crate) fn stop(pid: Pid) -> Result<Self, KernelError> {
        Self::ask(pid)?.until_stopped()
    }

    /// The same, and no filter of system calls is over it until it runs on.
    pub(super) fn stop_without_filter(pid: Pid) -> Result<Self, KernelError> {
        Self::seize(pid, PTRACE_O_SUSPEND_SECCOMP)?.until_stopped()
    }

    /// Asks a thread to stop. Nobody may drop what this gives before it has.
    pub(crate) fn ask(pid: Pid) -> Result<Self, KernelError> {
        Self::seize(pid, 0)
    }

    fn seize(pid: Pid, options: i32) -> Result<Self, KernelError> {
        let options = (libc::PTRACE_O_TRACESYSGOOD | options) as usize;
        request(libc::PTRACE_SEIZE, pid, 0, options, "PTRACE_SEIZE")?;
        let this = Self { pid };
        request(libc::PTRACE_INTERRUPT, pid, 0, 0, "PTRACE_INTERRUPT")?;
        Ok(this)
    }

    fn until_stopped(self) -> Result<Self, KernelError> {
        while !self.is_stop(self.wait()?)? {}
        Ok(self)
    }

    /// Whether one that was asked has stopped by now.
    pub(crate) fn has_stopped(&self) -> Result<bool, KernelError> {
        self.look(libc::WNOHANG)?.map_or(Ok(false), |stop| self.is_stop(stop))
    }

    pub(crate) fn thread(&self) -> Pid {
        self.pid
    }

    /// Whether this is the stop that was asked for (or one of its whole group, which is as good); lets it go on
    /// to that otherwise.
    fn is_stop(&self, stop: Stop) -> Result<bool, KernelError> {
        match stop {
            Stop::Trap => return Ok(true),
            Stop::Signal(signal) => self.go_on(libc::PTRACE_CONT, signal)?,
            Stop::SyscallEdge => self.go_on(libc::PTRACE_CONT, 0)?,
        }
        // Another stop may have taken the place of the one that was asked for.
        request(libc::PTRACE_INTERRUPT, self.pid, 0, 0, "PTRACE_INTERRUPT").map(|()| false)
    }

    pub(super) fn registers(&self) -> Result<Registers, KernelError> {
        // SAFETY: the struct is integers only; all zeros is a value of it.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        let bytes = size_of::<Registers>();
        self.regset(libc::PTRACE_GETREGSET, NT_PRSTATUS, (&raw mut registers).cast(), bytes)?;
        Ok(registers)
    }

    pub(super) fn set_registers(&self, registers: &Registers) -> Result<(), KernelError> {
        let at = ptr::from_ref(registers).cast_mut().cast();
        self.regset(libc::PTRACE_SETREGSET, NT_PRSTATUS, at, size_of::<Registers>()).map(drop)
    }

    pub(super) fn vector_state(&self) -> Result<Vec<u8>, KernelError> {
        let mut bytes = vec![0; MOST_VECTOR_BYTES];
        let at = bytes.as_mut_ptr().cast();
        let filled = self.regset(libc::PTRACE_GETREGSET, NT_X86_XSTATE, at, bytes.len())?;
        bytes.truncate(filled);
        Ok(bytes)
    }

    pub(super) fn signal_mask(&self) -> Result<u64, KernelError> {
        let mut mask = 0u64;
        let at = &raw mut mask as usize;
        request(PTRACE_GETSIGMASK, self.pid, size_of::<u64>(), at, "PTRACE_GETSIGMASK")?;
        Ok(mask)
    }

    /// Lets the thread run through the system call that ends at `after`, and
    /// returns its result.
    pub(super) fn watch_call(&self, after: u64) -> Result<i64, KernelError> {
        let mut entered = false;
        let mut signal = 0;
        loop {
            self.go_on(libc::PTRACE_SYSCALL, signal)?;
            signal = 0;
            match self.wait()? {
                Stop::Signal(arrived) => signal = arrived,
                Stop::Trap => {}
                // A signal handler's own calls stop here too, elsewhere.
                Stop::SyscallEdge => {
                    let registers = self.registers()?;
                    match (registers.rip == after, entered) {
                        (true, true) => return Ok(registers.rax as i64),
                        (true, false) => entered = true,
                        (false, _) => {}
                    }
                }
            }
        }
    }

    fn go_on(&self, how: libc::c_uint, signal: i32) -> Result<(), KernelError> {
        request(how, self.pid, 0, signal as usize, "PTRACE_CONT")
    }

    fn wait(&self) -> Result<Stop, KernelError> {
        let gone = || io::Error::other("there is nothing to wait for");
        self.look(0)?.ok_or_else(|| KernelError::new("waitpid", self.pid.to_string(), gone()))
    }

    /// What became of it; nothing where it runs and that is not waited for.
    fn look(&self, how: i32) -> Result<Option<Stop>, KernelError> {
        let mut status = 0;
        loop {
            // SAFETY: status outlives the call.
            let waited = unsafe { libc::waitpid(self.pid.0, &mut status, libc::__WALL | how) };
            if waited == self.pid.0 {
                break;
            }
            if waited == 0 {
                return Ok(None);
            }
            let cause = io::Error::last_os_error();
            if cause.kind() != io::ErrorKind::Interrupted {
                return Err(KernelError::new("waitpid", self.pid.to_string(), cause));
            }
        }
        if !libc::WIFSTOPPED(status) {
            let cause = io::Error::other("it ended");
            return Err(KernelError::new("waitpid", self.pid.to_string(), cause));
        }
        Ok(Some(match (libc::WSTOPSIG(status), status >> 16) {
            (_, event) if event != 0 => Stop::Trap,
            (SYSCALL_STOP, _) => Stop::SyscallEdge,
            (signal, _) => Stop::Signal(signal),
        }))
    }

    /// Reads or writes a register set; returns how many bytes it has.
    fn regset(
        &self,
        which: libc::c_uint,
        set: usize,
        at: *mut libc::c_void,
        bytes: usize,
    ) -> Result<usize, KernelError> {
        let mut vector = libc::iovec { iov_base: at, iov_len: bytes };
        request(which, self.pid, set, &raw mut vector as usize, "PTRACE_REGSET")?;
        Ok(vector.iov_len)
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // Fails only where the thread is gone.
        let _ = request(libc::PTRACE_DETACH, self.pid, 0, 0, "PTRACE_DETACH");
    }
}

enum Stop {
    Trap,
    SyscallEdge,
    Signal(i32),
}

fn request(
    which: libc::c_uint,
    pid: Pid,
    address: usize,
    data: usize,
    name: &'static str,
) -> Result<(), KernelError> {
    // SAFETY: ptrace reads and writes our memory only at `data`, for requests
    // whose callers above pass a live object of the size that the request
    // writes; all else happens in the traced thread.
    let result = unsafe {
        libc::ptrace(which, pid.0, address as *mut libc::c_void, data as *mut libc::c_void)
    };
    if result < 0 { Err(KernelError::last(name, pid.to_string())) } else { Ok(()) }
}
