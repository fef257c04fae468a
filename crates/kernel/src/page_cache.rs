//! The page cache: how much of a file is in it, and reading that takes no disk time which others want.

use crate::KernelError;
use std::fs::File;
use std::os::fd::AsRawFd;

/// `__NR_cachestat` (all architectures; Linux 6.5).
const CACHESTAT: libc::c_long = 451;
/// `IOPRIO_WHO_PROCESS`, and `IOPRIO_CLASS_IDLE` in its place (ioprio_set(2)).
const WHO_PROCESS: libc::c_int = 1;
const CLASS_IDLE: libc::c_int = 3 << 13;

/// `struct cachestat_range` (include/uapi/linux/mman.h).
#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

/// `struct cachestat`.
#[repr(C)]
#[derive(Default)]
struct Stat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// How many pages of a part of a file are in the page cache (cachestat(2)). To ask does not count as use.
///
/// # Errors
/// Where the kernel refuses: for files of some kinds, as of hugetlbfs.
pub fn cached_pages(file: &File, offset: u64, length: u64) -> Result<u64, KernelError> {
    if length == 0 {
        // For the kernel that is all that follows.
        return Ok(0);
    }
    let range = Range { offset, length };
    let mut stat = Stat::default();
    // SAFETY: the kernel reads the one and writes the other, which are as its header says.
    let result = unsafe {
        let (range, stat) = (std::ptr::from_ref(&range), std::ptr::from_mut(&mut stat));
        libc::syscall(CACHESTAT, file.as_raw_fd(), range, stat, 0)
    };
    match result {
        0 => Ok(stat.cached),
        _ => Err(KernelError::last("cachestat", "a file")),
    }
}

/// Lets this thread use disks only when nobody else does, where the disk's scheduler knows such a class.
///
/// # Errors
/// Where the kernel refuses.
pub fn read_when_idle() -> Result<(), KernelError> {
    // SAFETY: the call takes integers; 0 is the calling thread.
    let result = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE) };
    if result == 0 { Ok(()) } else { Err(KernelError::last("ioprio_set", "a thread")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_was_written_is_cached() {
        let mut file = tempfile();
        file.write_all(&[1; 5 * 4096]).expect("write");
        assert_eq!(cached_pages(&file, 0, 5 * 4096).expect("cachestat"), 5);
        assert_eq!(cached_pages(&file, 4096, 2 * 4096).expect("cachestat"), 2);
        assert_eq!(cached_pages(&file, 0, 0).expect("cachestat"), 0);
        file.sync_all().expect("sync");
        read_when_idle().expect("idle");
    }

    fn tempfile() -> File {
        let path = std::env::temp_dir().join(format!("dewar-cached-{}", std::process::id()));
        let options = &mut File::options();
        let file = options.create(true).truncate(true).read(true).write(true).open(&path);
        let _ = std::fs::remove_file(path);
        file.expect("file")
    }
}
