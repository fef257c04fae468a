//! Another kernel in place of this one: kexec_file_load(2), and the reboot(2) that starts it.

use crate::KernelError;
use rustix::system::{RebootCommand, reboot};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;

/// `KEXEC_FILE_UNLOAD` and `KEXEC_FILE_NO_INITRAMFS` (include/uapi/linux/kexec.h).
const UNLOAD: libc::c_ulong = 1;
const NO_INITRAMFS: libc::c_ulong = 4;

/// Loads a kernel for [`kexec`], in place of one that was loaded before.
///
/// # Errors
/// Where the kernel that runs refuses it, or the command line has a zero byte.
pub fn kexec_load(kernel: &File, initrd: Option<&File>, line: &str) -> Result<(), KernelError> {
    let failed = |cause: std::io::Error| KernelError::new("kexec_file_load", "a kernel", cause);
    let line = CString::new(line).map_err(|error| failed(error.into()))?;
    let flags = if initrd.is_none() { NO_INITRAMFS } else { 0 };
    let initrd = initrd.map_or(-1, File::as_raw_fd);
    call(kernel.as_raw_fd(), initrd, Some(&line), flags)
}

/// Has no kernel loaded any more.
///
/// # Errors
/// Where the kernel refuses.
pub fn kexec_unload() -> Result<(), KernelError> {
    call(-1, -1, None, UNLOAD)
}

fn call(kernel: i32, initrd: i32, line: Option<&CString>, flags: u64) -> Result<(), KernelError> {
    let bytes = line.map_or(0, |line| line.as_bytes_with_nul().len());
    let text = line.map_or(std::ptr::null(), |line| line.as_ptr());
    // SAFETY: the kernel reads `bytes` bytes of `text`, which has as many, zero byte included; the descriptors
    // are files that are open during the call, or none.
    let result =
        unsafe { libc::syscall(libc::SYS_kexec_file_load, kernel, initrd, bytes, text, flags) };
    if result == 0 { Ok(()) } else { Err(KernelError::last("kexec_file_load", "a kernel")) }
}

/// Starts the kernel that is loaded, at once: no process is ended in order, and no file system is written. It
/// returns only where that fails.
pub fn kexec() -> KernelError {
    match reboot(RebootCommand::Kexec) {
        Err(error) => KernelError::new("reboot", "the host", error),
        Ok(()) => KernelError::new("reboot", "the host", std::io::Error::other("it returned")),
    }
}
