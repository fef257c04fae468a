//! The header that comes before each packet of a tap (linux/if_tun.h).

use crate::KernelError;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

const TUNGETVNETHDRSZ: u64 = 0x8004_54d7;
const TUNSETVNETHDRSZ: u64 = 0x4004_54d8;

/// How many bytes it has.
///
/// # Errors
/// Where the descriptor is no tap.
pub fn tap_header_bytes(tap: impl AsFd) -> Result<i32, KernelError> {
    let mut bytes = 0;
    call(tap, TUNGETVNETHDRSZ, &mut bytes).map(|()| bytes)
}

/// Sets how many bytes it has, for everybody who has the tap open.
///
/// # Errors
/// Where the descriptor is no tap, or the number is too small.
pub fn set_tap_header_bytes(tap: impl AsFd, mut bytes: i32) -> Result<(), KernelError> {
    call(tap, TUNSETVNETHDRSZ, &mut bytes)
}

fn call(tap: impl AsFd, request: u64, bytes: &mut i32) -> Result<(), KernelError> {
    let fd = tap.as_fd().as_raw_fd();
    // SAFETY: both requests read or write one int, which `bytes` is for as long
    // as the call lasts; on a descriptor that is no tap they fail.
    if unsafe { libc::ioctl(fd, request, std::ptr::from_mut(bytes)) } < 0 {
        return Err(KernelError::new("ioctl", "a tap", io::Error::last_os_error()));
    }
    Ok(())
}
