//! The speed of the host's time stamp counter, as KVM gives it to guests.

use crate::KernelError;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `KVM_CREATE_VM` and `KVM_GET_TSC_KHZ` (include/uapi/linux/kvm.h).
const CREATE_VM: libc::c_ulong = 0xae01;
const GET_TSC_KHZ: libc::c_ulong = 0xaea3;

/// How many thousand times a second the counter of a new guest counts.
///
/// # Errors
/// Where there is no KVM, or its kernel (before 5.16) does not tell.
pub fn guest_tsc_khz() -> Result<u32, KernelError> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    let kvm = kvm.map_err(|error| KernelError::new("open", "/dev/kvm", error))?;
    // SAFETY: the request takes an integer, the kind of machine, and gives a new descriptor.
    let vm = unsafe { libc::ioctl(kvm.as_raw_fd(), CREATE_VM, 0) };
    if vm < 0 {
        return Err(KernelError::last("KVM_CREATE_VM", "/dev/kvm"));
    }
    // SAFETY: the kernel made this descriptor for us just now, and nobody else knows it.
    let vm = unsafe { OwnedFd::from_raw_fd(vm) };
    // SAFETY: the request takes nothing.
    let khz = unsafe { libc::ioctl(vm.as_raw_fd(), GET_TSC_KHZ, 0) };
    u32::try_from(khz).map_err(|_| KernelError::last("KVM_GET_TSC_KHZ", "/dev/kvm"))
}
