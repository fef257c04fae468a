//! The signal frame that puts a thread back (arch/x86/include/uapi/asm/
//! sigcontext.h and ucontext.h, arch/x86/kernel/fpu/signal.c).

use super::trace::Registers;
use std::arch::x86_64::__cpuid_count;
use std::io;

const RED_ZONE: u64 = 128;
const UC_FP_XSTATE: u64 = 1;
const UC_SIGCONTEXT_SS: u64 = 2;
const UC_STRICT_RESTORE_SS: u64 = 4;
/// No valid `ss_flags`: the kernel then leaves the alternate stack as it is.
const LEAVE_ALTERNATE_STACK: u64 = 0x7fff_ffff;
/// Return address, then the ucontext: flags, link, stack (3), registers (18),
/// segments, err, trapno, oldmask, cr2, fpstate, reserved (8), mask.
const FRAME_WORDS: usize = 1 + 1 + 1 + 3 + 18 + 1 + 5 + 8 + 1;

const LEGACY_BYTES: usize = 512;
const SOFTWARE_BYTES: usize = 464;
const HEADER_BYTES: usize = 64;
const MAGIC1: u32 = 0x4650_5853;
const MAGIC2: u32 = 0x4650_5845;
/// AMX tile data: a task has it only after asking, and its signal frames have
/// room for it only then.
const ON_REQUEST: u64 = 1 << 18;

/// Bytes to write into the target, and where.
#[derive(Debug)]
pub(super) struct Frame {
    pub bytes: Vec<u8>,
    pub address: u64,
}

/// The registers with which the thread goes on, where the stop interrupted a
/// system call: what the kernel would have done on the way out
/// (arch/x86/kernel/signal.c, `arch_do_signal_or_restart`).
pub(super) fn resumed_after_restart(stopped: &Registers) -> Registers {
    const ERESTARTSYS: i64 = -512;
    const ERESTARTNOINTR: i64 = -513;
    const ERESTARTNOHAND: i64 = -514;
    const ERESTART_RESTARTBLOCK: i64 = -516;
    let mut registers = *stopped;
    if (stopped.orig_rax as i64) < 0 {
        return registers;
    }
    match stopped.rax as i64 {
        ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND => {
            registers.rax = stopped.orig_rax;
            registers.rip -= super::SYSCALL_BYTES;
        }
        // What is left of its time is forgotten by the return from a signal.
        ERESTART_RESTARTBLOCK => registers.rax = -i64::from(libc::EINTR) as u64,
        _ => {}
    }
    registers
}

/// Lays the frame out below the thread's stack.
pub(super) fn build(
    registers: &Registers,
    vector_state: &[u8],
    mask: u64,
    restorer: u64,
) -> io::Result<Frame> {
    let vectors = signal_vector_state(vector_state)?;
    let frame_bytes = (FRAME_WORDS * 8) as u64;
    let vectors_at = (registers.rsp - RED_ZONE - vectors.len() as u64) & !63;
    let address = (vectors_at - frame_bytes) & !15;

    let r = registers;
    let mut words = Vec::with_capacity(FRAME_WORDS);
    words.push(restorer);
    words.extend([UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS, 0]);
    words.extend([0, LEAVE_ALTERNATE_STACK, 0]);
    words.extend([r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15]);
    words.extend([r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax, r.rcx, r.rsp, r.rip, r.eflags]);
    words.push((r.cs & 0xffff) | ((r.ss & 0xffff) << 48));
    words.extend([0, 0, mask, 0, vectors_at]);
    words.extend([0; 8]);
    words.push(mask);
    debug_assert_eq!(words.len(), FRAME_WORDS);

    let mut bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
    bytes.resize((vectors_at - address) as usize, 0);
    bytes.extend_from_slice(&vectors);
    Ok(Frame { bytes, address })
}

/// Turns ptrace's view of the vector registers (`NT_X86_XSTATE`) into the one
/// that a signal frame holds: cut to what a frame may carry, and marked.
fn signal_vector_state(regset: &[u8]) -> io::Result<Vec<u8>> {
    if regset.len() < LEGACY_BYTES + HEADER_BYTES {
        return Err(io::Error::other("this CPU has no XSAVE"));
    }
    let word = |at: usize| {
        regset[at..at + 8].iter().rev().fold(0u64, |word, &byte| (word << 8) | u64::from(byte))
    };
    let features = word(SOFTWARE_BYTES) & !ON_REQUEST;
    let size = standard_size(features).min(regset.len());
    let mut bytes = regset[..size].to_vec();
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(SOFTWARE_BYTES, &MAGIC1.to_le_bytes());
    put(SOFTWARE_BYTES + 4, &(size as u32 + 4).to_le_bytes());
    put(SOFTWARE_BYTES + 8, &features.to_le_bytes());
    put(SOFTWARE_BYTES + 16, &(size as u32).to_le_bytes());
    put(LEGACY_BYTES, &(word(LEGACY_BYTES) & features).to_le_bytes());
    bytes.extend_from_slice(&MAGIC2.to_le_bytes());
    Ok(bytes)
}

/// The size of the uncompacted XSAVE area that holds `features`.
fn standard_size(features: u64) -> usize {
    (2..63)
        .filter(|bit| features & (1 << bit) != 0)
        .map(|bit| {
            // SAFETY: every CPU with XSAVE, which the caller has seen, has leaf 13.
            #[allow(unused_unsafe, reason = "safe in later compilers")]
            let leaf = unsafe { __cpuid_count(0xd, bit) };
            (leaf.eax + leaf.ebx) as usize
        })
        .fold(LEGACY_BYTES + HEADER_BYTES, usize::max)
}
