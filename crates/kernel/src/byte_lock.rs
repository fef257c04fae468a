//! Locks on single bytes of a file that belong to an open file, not to a process (fcntl(2), open file description
//! locks). QEMU takes such locks on the files of its disks.

use crate::KernelError;
use std::fs::File;
use std::os::fd::AsRawFd;

/// Takes a shared lock on a byte, or gives up where somebody has an exclusive one.
///
/// # Errors
/// Where it is not given.
pub fn lock_byte(file: &File, at: u64) -> Result<(), KernelError> {
    ask(file, libc::F_OFD_SETLK, libc::F_RDLCK, at).map(drop)
}

/// Gives up the lock on a byte, if it has one.
///
/// # Errors
/// Where the file system has no such locks.
pub fn unlock_byte(file: &File, at: u64) -> Result<(), KernelError> {
    ask(file, libc::F_OFD_SETLK, libc::F_UNLCK, at).map(drop)
}

/// Whether another open file has a lock, of either kind, on a byte.
///
/// # Errors
/// Where the file system has no such locks.
pub fn is_byte_locked(file: &File, at: u64) -> Result<bool, KernelError> {
    let found = ask(file, libc::F_OFD_GETLK, libc::F_WRLCK, at)?;
    Ok(i32::from(found.l_type) != libc::F_UNLCK)
}

fn ask(file: &File, command: i32, kind: i32, at: u64) -> Result<libc::flock, KernelError> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: at as libc::off_t,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open as long as `file` is borrowed, and `lock` is a whole flock of ours that the
    // kernel reads and, for F_OFD_GETLK, writes before the call returns.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) };
    match answer {
        -1 => Err(KernelError::last("fcntl", format!("byte {at} of a file"))),
        _ => Ok(lock),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    #[test]
    fn a_lock_is_seen_by_another_open_file_alone() {
        let one = File::from(memfd_create("locks", MemfdFlags::CLOEXEC).expect("memfd"));
        let path = format!("/proc/self/fd/{}", one.as_raw_fd());
        let other = File::options().read(true).write(true).open(path).expect("open");
        assert!(!is_byte_locked(&other, 101).expect("ask"));
        lock_byte(&one, 101).expect("lock");
        assert!(is_byte_locked(&other, 101).expect("ask"));
        assert!(!is_byte_locked(&other, 102).expect("ask"));
        assert!(!is_byte_locked(&one, 101).expect("ask"), "it is its own");
        lock_byte(&other, 101).expect("shared");
        unlock_byte(&one, 101).expect("unlock");
        assert!(!is_byte_locked(&other, 101).expect("ask"));
        drop(one);
        drop(other);
    }
}
